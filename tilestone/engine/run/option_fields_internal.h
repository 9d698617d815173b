// Made by `tools/options --fix` from options.h: the fields of each struct of options, and the words
// for the values of their enums.
#pragma once
// clang-format off

#include "tilestone/engine/run/options.h"

namespace tilestone {

// Calls visit(name, field, mask) for each field. Ranks compare it when they save (1) or load (2).
template <typename Options>
struct FieldsOf;
template <typename Enum>
struct WordsOf;

template <>
struct FieldsOf<ByFiles> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("rank", &ByFiles::rank, 0);
    visit("world_size", &ByFiles::world_size, 0);
    visit("token", &ByFiles::token, 0);
    visit("number", &ByFiles::number, 0);
    visit("wait", &ByFiles::wait, 0);
    visit("torch_rank_local", &ByFiles::torch_rank_local, 0);
  }
};

template <>
struct FieldsOf<LocalCopies> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("group", &LocalCopies::group, 0);
    visit("max_bytes", &LocalCopies::max_bytes, 0);
  }
};

template <>
struct WordsOf<Checks::Differing> {
  static constexpr const char* words[] = {"ignore", "warn", "error"};
};

template <>
struct FieldsOf<Checks> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("access", &Checks::access, 3);
    visit("common_differs", &Checks::common_differs, 1);
    visit("checksums", &Checks::checksums, 2);
  }
};

template <>
struct WordsOf<Differences::Policy> {
  static constexpr const char* words[] = {"error", "report", "ignore"};
};

template <>
struct FieldsOf<Differences> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("not_in_checkpoint", &Differences::not_in_checkpoint, 3);
    visit("not_requested", &Differences::not_requested, 3);
    visit("other_shape", &Differences::other_shape, 3);
    visit("report", &Differences::report, 0);
  }
};

template <>
struct WordsOf<Reading::TwoPhase> {
  static constexpr const char* words[] = {"auto", "always", "never"};
};

template <>
struct FieldsOf<Reading> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("two_phase", &Reading::two_phase, 3);
    visit("cache", &Reading::cache, 0);
    visit("follow_links", &Reading::follow_links, 0);
  }
};

template <>
struct FieldsOf<Resources> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("threads", &Resources::threads, 0);
    visit("buffer_bytes", &Resources::buffer_bytes, 0);
    visit("files_per_rank", &Resources::files_per_rank, 0);
  }
};

template <>
struct FieldsOf<SaveOptions> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("comm", &SaveOptions::comm, 0);
    visit("format", &SaveOptions::format, 3);
    visit("dialect", &SaveOptions::dialect, 3);
    visit("by_files", &SaveOptions::by_files, 0);
    visit("overwrite", &SaveOptions::overwrite, 3);
    visit("checks", &SaveOptions::checks, 0);
    visit("copies", &SaveOptions::copies, 0);
    visit("resources", &SaveOptions::resources, 0);
    visit("timeout", &SaveOptions::timeout, 0);
    visit("tp_replica_names", &SaveOptions::tp_replica_names, 3);
    visit("separation_hint", &SaveOptions::separation_hint, 0);
    visit("verify_integrity", &SaveOptions::verify_integrity, 3);
    visit("attributes", &SaveOptions::attributes, 3);
    visit("tensor_attributes", &SaveOptions::tensor_attributes, 0);
    visit("step", &SaveOptions::step, 0);
    visit("progress", &SaveOptions::progress, 0);
    visit("interrupt", &SaveOptions::interrupt, 0);
  }
};

template <>
struct WordsOf<AsyncOptions::OnError> {
  static constexpr const char* words[] = {"raise", "warn"};
};

template <>
struct WordsOf<AsyncOptions::InFlight> {
  static constexpr const char* words[] = {"wait", "fail", "skip"};
};

template <>
struct FieldsOf<AsyncOptions> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("on_error", &AsyncOptions::on_error, 0);
    visit("in_flight", &AsyncOptions::in_flight, 0);
    visit("max_staged_bytes", &AsyncOptions::max_staged_bytes, 0);
  }
};

template <>
struct FieldsOf<LoadOptions> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("comm", &LoadOptions::comm, 0);
    visit("own_rank", &LoadOptions::own_rank, 0);
    visit("format", &LoadOptions::format, 3);
    visit("unmarked", &LoadOptions::unmarked, 3);
    visit("cast", &LoadOptions::cast, 0);
    visit("differences", &LoadOptions::differences, 0);
    visit("checks", &LoadOptions::checks, 0);
    visit("reading", &LoadOptions::reading, 0);
    visit("resources", &LoadOptions::resources, 0);
    visit("timeout", &LoadOptions::timeout, 0);
    visit("rename", &LoadOptions::rename, 0);
    visit("subtrees", &LoadOptions::subtrees, 0);
    visit("fill_empty", &LoadOptions::fill_empty, 0);
    visit("unmade", &LoadOptions::unmade, 0);
    visit("kept_empty", &LoadOptions::kept_empty, 0);
    visit("complete", &LoadOptions::complete, 0);
    visit("sharded_only", &LoadOptions::sharded_only, 3);
    visit("objects_by_grid", &LoadOptions::objects_by_grid, 3);
    visit("log_report", &LoadOptions::log_report, 0);
    visit("progress", &LoadOptions::progress, 0);
    visit("interrupt", &LoadOptions::interrupt, 0);
  }
};

template <>
struct FieldsOf<OpenOptions> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("format", &OpenOptions::format, 0);
    visit("unmarked", &OpenOptions::unmarked, 0);
    visit("checks", &OpenOptions::checks, 0);
    visit("reading", &OpenOptions::reading, 0);
    visit("resources", &OpenOptions::resources, 0);
    visit("interrupt", &OpenOptions::interrupt, 0);
  }
};

template <>
struct WordsOf<CachePolicy> {
  static constexpr const char* words[] = {"bypass", "keep"};
};

}  // namespace tilestone
