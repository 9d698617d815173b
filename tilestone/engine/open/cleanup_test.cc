#include "tilestone/engine/open/cleanup_internal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tilestone/base/uuid.h"
#include "tilestone/format/data_file_name.h"
#include "tilestone/format/manifest.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::engine::cleanup_test {

TEST(Cleanup, KnowsItsOwnNamesOfEverySave) {
  for (int i = 0; i < 50; ++i) {
    const std::string id = random_uuid();
    EXPECT_TRUE(is_own_name(data_file_name(id, 0, 0)));
    EXPECT_TRUE(is_own_name(data_file_name(id, 16383, 7)));
    EXPECT_EQ(parse_tilestone_name("optim.__" + data_file_name(id, 1, 0))->save_id, id);
    EXPECT_TRUE(is_own_name(manifest_name(id)));
    EXPECT_TRUE(is_own_name(temporary_name(id, "metadata")));
  }
}

TEST(Cleanup, NoOtherNameIsTakenForAnOwnOne) {
  const std::string id = "01234567-89ab-4cde-8f01-23456789abcd";
  for (const std::string& name : std::vector<std::string>{
           "__0_0.distcp", ".metadata", "__0.metadata", "common.pt", "notes.txt", id, id + ".txt",
           data_file_name(id, 0, 0) + ".bak", "sub/" + data_file_name(id, 0, 0),
           data_file_name("0123", 0, 0), ".tilestone/lock", ".tilestone/replaced",
           ".tilestone/" + id, ".tilestone/" + id + ".txt", "other/" + manifest_name(id)}) {
    EXPECT_FALSE(is_own_name(name)) << name;
  }
}

TEST(Cleanup, WhatIsReferencedIsNoLeftover) {
  const std::string dead = random_uuid(), live = random_uuid();
  const std::vector<std::string> names{".metadata", data_file_name(dead, 0, 0),
                                       data_file_name(live, 0, 0), manifest_name(dead),
                                       manifest_name(live)};
  Notes notes;
  notes.begun = {dead, live};
  EXPECT_THAT(leftovers(names, {names[2], names[4]}, notes, notes.ended("")),
              testing::ElementsAre(names[1], names[3]));
}

TEST(Cleanup, FilesOfASaveThatHasNotEndedHereAreNoLeftovers) {
  const std::string id = random_uuid();
  const std::vector<std::string> names{data_file_name(id, 0, 0), manifest_name(id)};
  Notes notes;
  notes.begun = {random_uuid()};
  EXPECT_THAT(leftovers(names, {}, notes, notes.ended("")), testing::IsEmpty());
}

TEST(Cleanup, ANoteNamesItsSaveAndOnceThatIsPublishedThoseThatItReplaces) {
  const auto storage = memory_storage();
  storage->directories()->make(std::string(kTilestoneDirectory));
  const std::string id = random_uuid(), old = random_uuid(), torn = random_uuid();
  leave_note(*storage, id, {old}, Deadline::never());
  storage->create(note_name(torn))->close();
  const Notes notes = read_notes(*storage, storage->list());
  EXPECT_THAT(notes.ended(""), testing::UnorderedElementsAre(id, torn));
  EXPECT_THAT(notes.ended(torn), testing::UnorderedElementsAre(id, torn));
  EXPECT_THAT(notes.ended(id), testing::UnorderedElementsAre(id, old, torn));
}

TEST(Cleanup, DataFilesWithTextBeforeTheSaveIdAreLeftoversOnlyIfANoteHasThatText) {
  const auto storage = memory_storage();
  storage->directories()->make(std::string(kTilestoneDirectory));
  const std::string id = random_uuid(), old = random_uuid();
  leave_note(*storage, id, {"hint-" + id, old, "text-" + old}, Deadline::never());
  const std::string own = data_file_name("hint-" + id, 0, 0);
  const std::string replaced = data_file_name("text-" + old, 0, 0);
  const std::vector<std::string> names{own, replaced, data_file_name("copy-" + id, 0, 0),
                                       data_file_name("hint-" + old, 0, 0)};
  const Notes notes = read_notes(*storage, storage->list());
  EXPECT_THAT(leftovers(names, {}, notes, notes.ended("")), testing::ElementsAre(own));
  EXPECT_THAT(leftovers(names, {}, notes, notes.ended(id)), testing::ElementsAre(own, replaced));
}

}  // namespace tilestone::engine::cleanup_test
