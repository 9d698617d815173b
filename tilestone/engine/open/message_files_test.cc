// Files as a place where ranks leave messages.
#include <gtest/gtest.h>

#include "tilestone/base/uuid.h"
#include "tilestone/comm/store_communicator_testing.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/message_files_internal.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::engine::message_files_test {

comm_testing::ViewOf place_in(const std::shared_ptr<Storage>& storage) {
  return [storage, id = random_uuid()](int process) {
    return std::make_shared<MessageFiles>(storage, id, std::to_string(process));
  };
}

TEST(MessageFiles, FilesAreAPlaceForMessages) {
  const TempDirectory directory;
  for (const auto& storage : {memory_storage(), posix_storage(directory.path())}) {
    comm_testing::check_messages(place_in(storage));
    comm_testing::check_meeting([&] { return place_in(storage); });
    for (const std::string& name : storage->list()) {
      EXPECT_EQ(parse_tilestone_name(name)->kind, kReceiptKind) << name;
    }
  }
}

}  // namespace tilestone::engine::message_files_test
