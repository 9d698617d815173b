// Made by `tools/options --fix` from options.h: the fields of each struct of options, and the words
// for the values of their enums.
#pragma once
// clang-format off

#include <type_traits>

#include "tilestone/engine/run/options.h"

namespace tilestone {

// FieldsOf<Options>::each(visit) calls visit(name, field, Compared()) for each field.
template <typename Options>
struct FieldsOf;
template <typename Options>
concept HasFields = requires { sizeof(FieldsOf<Options>); };

// Whether ranks compare a field when they save (1) or load (2).
template <int mask>
using Compared = std::integral_constant<int, mask>;

template <typename Enum>
struct WordsOf;
template <typename Enum>
concept HasWords = requires { sizeof(WordsOf<Enum>); };

template <>
struct FieldsOf<ByFiles> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("rank", &ByFiles::rank, Compared<0>());
    visit("world_size", &ByFiles::world_size, Compared<0>());
    visit("token", &ByFiles::token, Compared<0>());
    visit("number", &ByFiles::number, Compared<0>());
    visit("wait", &ByFiles::wait, Compared<0>());
    visit("torch_rank_local", &ByFiles::torch_rank_local, Compared<0>());
  }
};

template <>
struct FieldsOf<LocalCopies> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("group", &LocalCopies::group, Compared<0>());
    visit("max_bytes", &LocalCopies::max_bytes, Compared<0>());
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
    visit("access", &Checks::access, Compared<3>());
    visit("common_differs", &Checks::common_differs, Compared<1>());
    visit("checksums", &Checks::checksums, Compared<2>());
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
    visit("not_in_checkpoint", &Differences::not_in_checkpoint, Compared<3>());
    visit("not_requested", &Differences::not_requested, Compared<3>());
    visit("other_shape", &Differences::other_shape, Compared<3>());
    visit("report", &Differences::report, Compared<0>());
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
    visit("two_phase", &Reading::two_phase, Compared<3>());
    visit("cache", &Reading::cache, Compared<0>());
    visit("follow_links", &Reading::follow_links, Compared<0>());
  }
};

template <>
struct FieldsOf<Resources> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("threads", &Resources::threads, Compared<0>());
    visit("buffer_bytes", &Resources::buffer_bytes, Compared<0>());
    visit("files_per_rank", &Resources::files_per_rank, Compared<0>());
  }
};

template <>
struct FieldsOf<SaveOptions> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("comm", &SaveOptions::comm, Compared<0>());
    visit("format", &SaveOptions::format, Compared<3>());
    visit("dialect", &SaveOptions::dialect, Compared<3>());
    visit("by_files", &SaveOptions::by_files, Compared<0>());
    visit("overwrite", &SaveOptions::overwrite, Compared<3>());
    visit("checks", &SaveOptions::checks, Compared<0>());
    visit("copies", &SaveOptions::copies, Compared<0>());
    visit("reuse", &SaveOptions::reuse, Compared<0>());
    visit("resources", &SaveOptions::resources, Compared<0>());
    visit("timeout", &SaveOptions::timeout, Compared<0>());
    visit("tp_replica_names", &SaveOptions::tp_replica_names, Compared<3>());
    visit("separation_hint", &SaveOptions::separation_hint, Compared<0>());
    visit("verify_integrity", &SaveOptions::verify_integrity, Compared<3>());
    visit("attributes", &SaveOptions::attributes, Compared<3>());
    visit("tensor_attributes", &SaveOptions::tensor_attributes, Compared<0>());
    visit("step", &SaveOptions::step, Compared<0>());
    visit("progress", &SaveOptions::progress, Compared<0>());
    visit("interrupt", &SaveOptions::interrupt, Compared<0>());
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
    visit("on_error", &AsyncOptions::on_error, Compared<0>());
    visit("in_flight", &AsyncOptions::in_flight, Compared<0>());
    visit("max_staged_bytes", &AsyncOptions::max_staged_bytes, Compared<0>());
  }
};

template <>
struct WordsOf<Best::Mode> {
  static constexpr const char* words[] = {"min", "max"};
};

template <>
struct FieldsOf<Keep> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("last", &Keep::last, Compared<0>());
    visit("every", &Keep::every, Compared<0>());
    visit("best", &Keep::best, Compared<0>());
    visit("newer_than", &Keep::newer_than, Compared<0>());
  }
};

template <>
struct FieldsOf<LoadOptions> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("comm", &LoadOptions::comm, Compared<0>());
    visit("own_rank", &LoadOptions::own_rank, Compared<0>());
    visit("format", &LoadOptions::format, Compared<3>());
    visit("unmarked", &LoadOptions::unmarked, Compared<3>());
    visit("cast", &LoadOptions::cast, Compared<0>());
    visit("differences", &LoadOptions::differences, Compared<0>());
    visit("checks", &LoadOptions::checks, Compared<0>());
    visit("reading", &LoadOptions::reading, Compared<0>());
    visit("resources", &LoadOptions::resources, Compared<0>());
    visit("timeout", &LoadOptions::timeout, Compared<0>());
    visit("rename", &LoadOptions::rename, Compared<0>());
    visit("subtrees", &LoadOptions::subtrees, Compared<0>());
    visit("fill_empty", &LoadOptions::fill_empty, Compared<0>());
    visit("unmade", &LoadOptions::unmade, Compared<0>());
    visit("kept_empty", &LoadOptions::kept_empty, Compared<0>());
    visit("complete", &LoadOptions::complete, Compared<0>());
    visit("sharded_only", &LoadOptions::sharded_only, Compared<3>());
    visit("objects_by_grid", &LoadOptions::objects_by_grid, Compared<3>());
    visit("log_report", &LoadOptions::log_report, Compared<0>());
    visit("progress", &LoadOptions::progress, Compared<0>());
    visit("interrupt", &LoadOptions::interrupt, Compared<0>());
  }
};

template <>
struct FieldsOf<OpenOptions> {
  template <typename Visit>
  static void each(const Visit& visit) {
    visit("format", &OpenOptions::format, Compared<0>());
    visit("unmarked", &OpenOptions::unmarked, Compared<0>());
    visit("checks", &OpenOptions::checks, Compared<0>());
    visit("reading", &OpenOptions::reading, Compared<0>());
    visit("resources", &OpenOptions::resources, Compared<0>());
    visit("interrupt", &OpenOptions::interrupt, Compared<0>());
  }
};

template <>
struct WordsOf<CachePolicy> {
  static constexpr const char* words[] = {"bypass", "keep"};
};

}  // namespace tilestone
