#include "tilestone/cli/npy.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <system_error>

namespace tilestone::cli {
namespace {

std::string header(const TensorView& tensor) {
  std::string shape;
  for (const int64_t dim : tensor.shape) shape += fmt::format("{}, ", dim);
  std::string text = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}), }}",
                                 npy_descr(tensor.dtype), shape);
  // Magic (6 bytes), version (2) and length (2), then the text, padded so that the data begins at a
  // multiple of 64 bytes.
  constexpr size_t kBefore = 10;
  const size_t padded = (kBefore + text.size() + 1 + 63) / 64 * 64;
  text.resize(padded - kBefore - 1, ' ');
  text += '\n';
  std::string out("\x93NUMPY\x01\x00", 8);
  out += static_cast<char>(text.size() & 0xFF);
  out += static_cast<char>(text.size() >> 8);
  return out + text;
}

[[noreturn]] void fail(const std::string& path) {
  throw Error(ErrorCode::kIo, fmt::format("cannot write {}", path)).with_errno(errno);
}

}  // namespace

bool npy_has(DType dtype) { return npy_descr(dtype)[1] != 'V'; }

std::string npy_descr(DType dtype) {
  const uint64_t size = itemsize(dtype);
  for (const std::string_view kind : {"uint", "int", "float", "complex"}) {
    if (to_string(dtype) != fmt::format("{}{}", kind, 8 * size)) continue;
    if (dtype != DType::kComplex32)
      return fmt::format("{}{}{}", size == 1 ? '|' : '<', kind[0], size);
  }
  return dtype == DType::kBool ? "|b1" : fmt::format("|V{}", size);
}

void write_npy(const std::string& path, const TensorView& tensor) {
  namespace fs = std::filesystem;
  std::error_code none;
  // A link is followed, and what is no regular file (a pipe, /dev/stdout, a link to nothing) is
  // written to directly.
  const fs::path target = fs::canonical(path, none);
  const bool replaces = !none && fs::is_regular_file(target, none);
  const bool direct = !replaces && fs::exists(fs::symlink_status(path, none));
  const std::string final_path = target.empty() ? path : target.string();
  const std::string written = direct ? path : final_path + ".tilestone-part";
  const auto give_up = [&] {
    const int error = errno;
    if (!direct) fs::remove(written, none);
    errno = error;
    fail(path);
  };
  const auto close = [](std::FILE* f) { std::fclose(f); };
  std::unique_ptr<std::FILE, decltype(close)> file(std::fopen(written.c_str(), "wb"), close);
  if (file == nullptr) fail(path);
  if (replaces) {  // before the elements are in it: the old file may be closed to other users
    std::error_code refused;
    fs::permissions(written, fs::status(target, none).permissions(), refused);
    errno = refused.value();
    if (refused) give_up();
  }
  const std::string head = header(tensor);
  const uint64_t bytes = tensor.bytes();
  if (std::fwrite(head.data(), 1, head.size(), file.get()) != head.size() ||
      (bytes > 0 && std::fwrite(tensor.data, 1, bytes, file.get()) != bytes)) {
    give_up();
  }
  if (std::fclose(file.release()) != 0) give_up();
  if (!direct && std::rename(written.c_str(), final_path.c_str()) != 0) give_up();
}

}  // namespace tilestone::cli
