// Saves a state and reads it back: the smallest program that uses the installed library.
#include <tilestone/tilestone.h>

#include <algorithm>
#include <cstdio>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: cmake_user FOLDER\n");
    return 2;
  }
  std::vector<float> weight = {1, 2, 3, 4, 5, 6};
  tilestone::StateDict state;
  state["weight"] = tilestone::TensorView::of(weight, {2, 3});
  state["step"] = 1200;
  try {
    tilestone::save(state, argv[1], {.overwrite = true});

    tilestone::StateDict wanted;
    wanted["weight"] =  // load() allocates the memory
        tilestone::TensorView::without_data(tilestone::DType::kFloat32, {2, 3});
    wanted["step"] = nullptr;
    const tilestone::StateDict loaded = tilestone::load(wanted, argv[1]);
    const tilestone::TensorView read = loaded.get<tilestone::TensorView>("weight");
    if (!std::ranges::equal(read.elements<float>(), weight) || loaded.get<int>("step") != 1200) {
      std::fprintf(stderr, "the loaded state differs from the saved one\n");
      return 1;
    }
  } catch (const tilestone::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::printf("saved and read back: ok\n");
  return 0;
}
