#include "tilestone/engine/engine_testing.h"

#include <gtest/gtest.h>

#include <cstring>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/format/torch_dist/torch_dist.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone {

TensorView counting(DType dtype, const Dims& shape, int64_t first) {
  TensorView tensor = TensorView::allocate(dtype, shape);
  const uint64_t size = itemsize(dtype);
  const int64_t count = numel(shape);
  if (dtype == DType::kFloat32) {
    auto* reals = reinterpret_cast<float*>(tensor.data);
    for (int64_t i = 0; i < count; ++i) reals[i] = static_cast<float>(first + i);
    return tensor;
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t integer = first + i;
    std::memcpy(tensor.data + static_cast<uint64_t>(i) * size, &integer,
                std::min<uint64_t>(size, sizeof integer));
  }
  return tensor;
}

Bytes elements(const TensorView& tensor) {
  Bytes out(tensor.bytes());
  if (!out.empty()) pack_range(tensor.strided_view(), 0, out);
  return out;
}

StateDict row_state(int rank, int ranks, int64_t first) {
  StateDict state;
  state["w"] = ShardedTensor::from_rank_offsets(
      "w", counting(DType::kFloat32, {1, 8}, first + 8 * rank), {{0, rank, ranks}});
  state["p"] = counting(DType::kInt64, {3}, first);
  state["step"] = first;
  return state;
}

std::vector<Location> memory_locations(size_t count) {
  std::vector<Location> made;
  for (size_t i = 0; i < count; ++i) made.emplace_back(memory_storage());
  return made;
}

StateDict row_state(const Communicator& comm, int64_t first) {
  return row_state(comm.rank(), comm.size(), first);
}

StateDict hollow_state() {
  StateDict state;
  state["hollow"] = TensorView::without_data(DType::kFloat32, {2});
  return state;
}

StateDict row_template(const Communicator& comm) {
  StateDict state;
  state["w"] = ShardedTensor::from_rank_offsets(
      "w", TensorView::without_data(DType::kFloat32, {1, 8}), {{0, comm.rank(), comm.size()}});
  state["p"] = TensorView::without_data(DType::kInt64, {3});
  state["step"] = nullptr;
  return state;
}

Value step_of(const Checkpoint& checkpoint) {
  if (const auto common = checkpoint.common()) return *common->find("step");
  return checkpoint.read_object("step");
}

Bytes plain_of(const Checkpoint& checkpoint) {
  if (const auto common = checkpoint.common()) return elements(common->find("p")->as_tensor());
  return elements(checkpoint.read("p"));
}

void expect_rows(const Location& location, int64_t first, int rows) {
  OpenOptions options;
  options.resources.threads = 1;
  const Checkpoint checkpoint = Checkpoint::open(location, options);
  EXPECT_EQ(elements(checkpoint.read("w")), elements(counting(DType::kFloat32, {rows, 8}, first)));
  EXPECT_EQ(plain_of(checkpoint), elements(counting(DType::kInt64, {3}, first)));
  EXPECT_EQ(step_of(checkpoint), Value(first));
}

FileImage without_tilestones_files(FileImage image) {
  std::erase_if(image, [](const auto& file) { return file.first.starts_with(".tilestone"); });
  return image;
}

FileImage as_of_another_writer(FileImage image) {
  image = without_tilestones_files(std::move(image));
  Metadata metadata =
      torch_dist_format()->parse_index({{".metadata"}, {{".metadata", image.at(".metadata")}}, {}});
  metadata.save_id.clear();
  for (size_t i = 0; i < metadata.files.size(); ++i) {
    const std::string name = "__" + std::to_string(i) + "_0.distcp";
    auto node = image.extract(metadata.files[i]);
    node.key() = metadata.files[i] = name;
    image.insert(std::move(node));
  }
  metadata.index();
  image[".metadata"] = torch_dist_format()->encode_index(metadata).front().bytes;
  return image;
}

SaveOptions by_files(int rank, int ranks, const std::string& token, bool wait) {
  SaveOptions options;
  options.by_files = ByFiles{rank, ranks, token, 0, wait};
  options.timeout = 30;
  options.resources.threads = 1;
  return options;
}

SaveOptions rank_local(int rank, int ranks, uint64_t number) {
  SaveOptions options = by_files(rank, ranks);
  options.by_files->torch_rank_local = true;
  options.by_files->number = number;
  return options;
}

LoggedWarnings::LoggedWarnings() {
  set_log_sink([this](LogLevel level, std::string_view text) {
    const std::lock_guard lock(mutex_);
    if (level == LogLevel::kWarning) texts_.emplace_back(text);
  });
}

LoggedWarnings::~LoggedWarnings() { set_log_sink({}); }

std::vector<std::string> LoggedWarnings::texts() const {
  const std::lock_guard lock(mutex_);
  return texts_;
}

std::vector<std::string> failures(int n, const std::function<void(Communicator)>& body) {
  std::vector<std::string> texts;
  for (const std::exception_ptr& error : run_ranks_collect(n, body)) {
    texts.emplace_back();
    if (!error) continue;
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& caught) {
      texts.back() = caught.what();
    }
  }
  return texts;
}

}  // namespace tilestone
