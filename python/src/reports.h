// Made by `tools/options --fix` from the structs that calls return: their fields, for the binding.
#pragma once
// clang-format off

#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/commit/removal.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/convert/convert.h"
#include "tilestone/engine/delta/delta.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/engine/training_run/checkpoint_manager.h"

namespace tilestone::python {

template <typename Report>
struct ReportFields;

template <>
struct ReportFields<SaveResult> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("save_id", &SaveResult::save_id, "");
    visit("bytes_written", &SaveResult::bytes_written, "The bytes that this rank has written.");
    visit("items_written", &SaveResult::items_written, "The items that this rank has written, without copies.");
    visit("copies", &SaveResult::copies, "The copies that this rank has written of other ranks' shards.");
    visit("copy_bytes", &SaveResult::copy_bytes, "The bytes of these copies, which bytes_written includes.");
    visit("bytes_shared", &SaveResult::bytes_shared, "The bytes of this rank's items in files of an earlier checkpoint (`reuse`), not written anew.");
    visit("common_differs", &SaveResult::common_differs, "Whether the ranks' common states were compared and differ (Checks.common_differs).");
    visit("published", &SaveResult::published, "Whether the checkpoint exists. False only by files without `wait`: others still write.");
    visit("timings", &SaveResult::timings, "Seconds of this rank's steps: \"preparing\" (in Python, the state), \"planning\", \"staging\" (if it was taken), \"writing\", \"reporting\" and \"publishing\". What came between them is in none of them.");
  }
};

template <>
struct ReportFields<SessionStats> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("saves", &SessionStats::saves, "Saves that were planned.");
    visit("plans_exchanged", &SessionStats::plans_exchanged, "Saves for which the ranks sent their plans to rank 0.");
    visit("plans_from_cache", &SessionStats::plans_from_cache, "Saves that used the plan of an earlier save. For the saves in neither count, this rank made a new plan alone.");
    visit("plan_bytes_sent", &SessionStats::plan_bytes_sent, "Bytes of this rank's plans.");
  }
};

template <>
struct ReportFields<Damage> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("file", &Damage::file, "\"\": elements of a tensor that no file holds.");
    visit("offset", &Damage::offset, "Bytes, in the file.");
    visit("size", &Damage::size, "Bytes; the damage lies within this range.");
    visit("key", &Damage::key, "\"\": the bytes belong to no item.");
    visit("problem", &Damage::problem, "");
    visit("unsafe", &Damage::unsafe, "Looks like an attack, not like damage; reads throw UnsafeError.");
    visit("copy", &Damage::copy, "A copy is damaged, not the item that the index names.");
    visit("intact_in", &Damage::intact_in, "The file with an intact instance of the same item, which loads read instead. For an item that repair has encoded anew, the file of the index that describes it. \"\": there is none.");
    visit("item_offset", &Damage::item_offset, "Where the damaged item begins in the file, according to the checkpoint. `offset` may lie inside the item, or at the end of a file that is too short. None: no single item is damaged.");
    visit("beyond_end", &Damage::beyond_end, "The item reaches beyond the end of its file.");
  }
};

template <>
struct ReportFields<ShortFile> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("file", &ShortFile::file, "");
    visit("size", &ShortFile::size, "Bytes.");
    visit("expected", &ShortFile::expected, "Bytes: that its save has written, or else that its items need.");
    visit("keys", &ShortFile::keys, "Keys with items that reach beyond its end.");
    visit("first_key", &ShortFile::first_key, "One of them.");
  }
};

template <>
struct ReportFields<VerifyReport> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("files", &VerifyReport::files, "");
    visit("items", &VerifyReport::items, "");
    visit("bytes", &VerifyReport::bytes, "Bytes checked.");
    visit("items_without_checksum", &VerifyReport::items_without_checksum, "Items whose writer recorded no checksum.");
    visit("damages", &VerifyReport::damages, "Ordered by file and offset.");
    visit("short_files", &VerifyReport::short_files, "In the order of their names.");
    visit("notes", &VerifyReport::notes, "What the files have beside the checkpoint.");
    visit("seconds", &VerifyReport::seconds, "");
  }
};

template <>
struct ReportFields<RepairReport> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("mended", &RepairReport::mended, "Damages, as found before the repair. What another repair has mended meanwhile is left out.");
    visit("now", &RepairReport::now, "What verify finds after the repair.");
  }
};

template <>
struct ReportFields<Removal> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("keys", &Removal::keys, "Of tensors, and unique keys of objects; sorted.");
    visit("files", &Removal::files, "Data files that were removed as a whole, sorted.");
    visit("bytes", &Removal::bytes, "Total size of these files.");
    visit("by_other", &Removal::by_other, "Another caller removed the keys while this one waited.");
  }
};

template <>
struct ReportFields<UnpublishedSave> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("save_id", &UnpublishedSave::save_id, "");
    visit("world_size", &UnpublishedSave::world_size, "0 if its head can't be read.");
    visit("format", &UnpublishedSave::format, "That were passed to the save.");
    visit("dialect", &UnpublishedSave::dialect, "That were passed to the save.");
    visit("missing_count", &UnpublishedSave::missing_count, "How many ranks have not written.");
    visit("missing", &UnpublishedSave::missing, "The lowest of them, at most 16.");
    visit("failure", &UnpublishedSave::failure, "The error with which it has failed; \"\" if it has not.");
    visit("abandoned", &UnpublishedSave::abandoned, "Abandoned or failed: it can't become a checkpoint any more; gc removes its files.");
    visit("alive", &UnpublishedSave::alive, "Whether one of its ranks is working, as seen while it was watched (FindOptions.watch): True if one holds its claim or a file changed, False if not for at least a minute, None if not known.");
    visit("text", &UnpublishedSave::text, "Its state and what can be done about it, a sentence for users.");
  }
};

template <>
struct ReportFields<Leftover> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("name", &Leftover::name, "In the location; \"../NAME\" is a directory beside it.");
    visit("size", &Leftover::size, "Bytes; for a directory, the sum over its files.");
    visit("what", &Leftover::what, "\"data file of the save 0123...\", ...");
    visit("why", &Leftover::why, "Why it is not needed, as a clause: \"it was not published\".");
  }
};

template <>
struct ReportFields<ConvertOptions> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("format", &ConvertOptions::format, "\"torch_dist\", \"zarr\", \"safetensors\", which makes one file if the target's name ends with .safetensors, \"torch_checkpointing\", or \"torch_save\", which always makes one file. \"\": torch_save if the target's name ends with .pt or .pth; safetensors if it ends with .safetensors, or for a source in torch_dist or zarr; else torch_dist.");
    visit("dialect", &ConvertOptions::dialect, "\"\": the source's.");
    visit("keys", &ConvertOptions::keys, "Shell-style patterns of the source's keys; empty: all.");
    visit("only", &ConvertOptions::only, "Only the part of the tree with this name, which becomes.");
    visit("rename", &ConvertOptions::rename, "The whole: \"model\". In Megatron-Core's dialect, whose keys do not begin with \"model.\": all tensors but the optimizer's.");
    visit("rename_by", &ConvertOptions::rename_by, "Names a key, as `only` and `rename` have left it; \"\": it is left out.");
    visit("cast", &ConvertOptions::cast, "Converts tensors of float16, bfloat16, float32 and float64; all others keep their dtype.");
    visit("optimizer", &ConvertOptions::optimizer, "\"fully_reshardable\": the states of Megatron-Core's distributed optimizer that are stored in buckets (dp_reshardable, dp_zero_gather_scatter) become a tensor for each parameter, which loads into any layout, with the same values. \"\": they are copied as they are.");
    visit("layout_file", &ConvertOptions::layout_file, "JSON that says where each parameter is in the buckets, made in Python by tilestone.megatron.distributed_optimizer.write_layouts. Implies `optimizer`. \"\": the layout that the checkpoint holds.");
    visit("shard_bytes", &ConvertOptions::shard_bytes, "Safetensors: the bytes of tensors in one file; 0: one file.");
    visit("files", &ConvertOptions::files, "Safetensors, in place of shard_bytes: the file in the folder that gets each key, by its new name, and that of all other keys. \"\": there must be none.");
    visit("other_file", &ConvertOptions::other_file, "");
    visit("comm", &ConvertOptions::comm, "Every rank calls, and each writes some of the files of a folder of safetensors; without a dry_run. Default: a group of one.");
    visit("dry_run", &ConvertOptions::dry_run, "Checks and lists everything, but writes nothing.");
    visit("reading", &ConvertOptions::reading, "Of the source.");
    visit("checks", &ConvertOptions::checks, "Of the source.");
    visit("resources", &ConvertOptions::resources, "");
    visit("timeout", &ConvertOptions::timeout, "Seconds.");
    visit("progress", &ConvertOptions::progress, "");
    visit("interrupt", &ConvertOptions::interrupt, "");
  }
};

template <>
struct ReportFields<ConvertResult> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("format", &ConvertResult::format, "Of the new checkpoint.");
    visit("dialect", &ConvertResult::dialect, "");
    visit("keys", &ConvertResult::keys, "In the order of the new keys.");
    visit("left_out", &ConvertResult::left_out, "Keys of the source that the options leave out.");
    visit("has_common", &ConvertResult::has_common, "Megatron-Core's common state was copied.");
    visit("bytes", &ConvertResult::bytes, "Of the tensors, as written.");
    visit("seconds", &ConvertResult::seconds, "");
  }
};

template <>
struct ReportFields<DeltaReport> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("base", &DeltaReport::base, "The id of the version that it begins with. A whole version begins with that of no tensors.");
    visit("result", &DeltaReport::result, "The id of the version that it leads to, made of all its tensors.");
    visit("unchanged", &DeltaReport::unchanged, "How many tensors are as in the base.");
    visit("changed", &DeltaReport::changed, "How many tensors have other elements.");
    visit("added", &DeltaReport::added, "How many tensors are new, or have another dtype or shape.");
    visit("removed", &DeltaReport::removed, "How many tensors of the base are gone.");
    visit("left_out", &DeltaReport::left_out, "How many objects the new version has: a delta has only tensors.");
    visit("bytes", &DeltaReport::bytes, "The size of the delta.");
    visit("whole_bytes", &DeltaReport::whole_bytes, "The size of the new version's tensors.");
    visit("seconds", &DeltaReport::seconds, "How long it took.");
  }
};

template <>
struct ReportFields<StepInfo> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("step", &StepInfo::step, "");
    visit("name", &StepInfo::name, "The name of its folder.");
    visit("state", &StepInfo::state, "\"durable\", \"unfinished\", \"damaged\" or \"foreign\".");
    visit("problem", &StepInfo::problem, "Why it is not durable, as a clause; \"\" if it is.");
    visit("is_saved_to", &StepInfo::is_saved_to, "A save, a repair or a removal is under way there.");
    visit("is_link", &StepInfo::is_link, "The folder is a symbolic link; it is never pruned.");
    visit("format", &StepInfo::format, "\"torch_dist\"; \"\" if there is no checkpoint that can be read.");
    visit("dialect", &StepInfo::dialect, "\"pytorch\".");
    visit("writer", &StepInfo::writer, "The program that saved it: \"Tilestone 0.1.0\".");
    visit("bytes", &StepInfo::bytes, "Of all its files.");
    visit("time", &StepInfo::time, "When it was saved, in seconds since 1970; None: not known.");
    visit("metrics", &StepInfo::metrics, "What was given to CheckpointManager.save.");
    visit("save_id", &StepInfo::save_id, "The id of its save; \"\": not known.");
    visit("lineage", &StepInfo::lineage, "");
    visit("hint", &StepInfo::hint, "The file in the run's directory that says all this; \"\": there is none.");
  }
};

}  // namespace tilestone::python
