// Saves a state and reads it back: the smallest program that uses the installed library.
#include <tilestone/tilestone.h>

#include <cstdio>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: cmake_user FOLDER\n");
    return 2;
  }
  std::vector<float> weight = {1, 2, 3, 4, 5, 6};
  tilestone::StateDict state;
  state["weight"] =
      tilestone::TensorView::contiguous(weight.data(), tilestone::DType::kFloat32, {2, 3});
  state["step"] = 1200;
  try {
    tilestone::save(state, argv[1], {.overwrite = true});

    std::vector<float> read(weight.size());
    const auto checkpoint = tilestone::Checkpoint::open(argv[1]);
    checkpoint.read_into(
        "weight", std::nullopt,
        tilestone::TensorView::contiguous(read.data(), tilestone::DType::kFloat32, {2, 3}));
    if (read != weight) {
      std::fprintf(stderr, "what was read differs from what was saved\n");
      return 1;
    }
  } catch (const tilestone::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::printf("saved and read back: ok\n");
  return 0;
}
