// The C++ interface as a contestant of bench/main.py, which sends commands on standard input.
//
//   save_load CHECKPOINT
//
// Reads the checkpoint's tensors into memory twice: one set to save and one set for loads to fill.
// Prints "ready", then answers each command with one line. "save DIR" and "load DIR" are answered
// with the seconds that the call took, and "same" with the number of tensors whose two copies
// differ. Any command may be answered with "error TEXT".
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <string>

#include "tilestone/tilestone.h"

namespace {

using namespace tilestone;

StateDict read_all(const std::string& path) {
  // Checksums are not verified, because no_checksum.cc may be active.
  const Checkpoint checkpoint = Checkpoint::open(path, {.checks = {.checksums = false}});
  StateDict state;
  for (const StoredTensor& tensor : checkpoint.metadata().tensors) {
    state[tensor.key] = checkpoint.read(tensor.key);
  }
  return state;
}

template <typename Work>
double seconds_of(const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

size_t differences(const StateDict& a, const StateDict& b) {
  size_t count = 0;
  for (const auto& [key, node] : a) {
    const auto* x = node.get_if<TensorView>();
    const auto* y = b.find(key)->get_if<TensorView>();
    if (std::memcmp(x->data, y->data, x->bytes()) != 0) ++count;
  }
  return count;
}

void blank(StateDict& state) {
  for (auto& [key, node] : state) {
    const auto* tensor = node.get_if<TensorView>();
    std::memset(tensor->data, 0, tensor->bytes());
  }
}

std::string answer(const std::string& line, const StateDict& state, const StateDict& targets) {
  if (line == "same") return std::to_string(differences(state, targets));
  const std::string path = line.size() > 5 ? line.substr(5) : "";
  if (line.starts_with("save ")) return std::to_string(seconds_of([&] { save(state, path); }));
  if (line.starts_with("load ")) return std::to_string(seconds_of([&] { load(targets, path); }));
  return "error unknown command " + line;
}

std::string one_line(std::string text) {
  for (char& c : text) {
    if (c == '\n') c = ' ';
  }
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: save_load CHECKPOINT\n");
    return 2;
  }
  try {
    const StateDict state = read_all(argv[1]);
    StateDict targets = read_all(argv[1]);
    blank(targets);
    std::cout << "ready" << std::endl;
    for (std::string line; std::getline(std::cin, line);) {
      try {
        std::cout << one_line(answer(line, state, targets)) << std::endl;
      } catch (const Error& error) {
        std::cout << "error " << one_line(error.what()) << std::endl;
      }
    }
    return 0;
  } catch (const Error& error) {
    std::cout << "error " << one_line(error.what()) << std::endl;
    return 1;
  }
}
