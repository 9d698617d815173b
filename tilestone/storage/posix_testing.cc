#include "tilestone/storage/posix_testing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

namespace tilestone {

void append_numbered(WritableFile& file, BufferPool& pool, size_t count, size_t size) {
  for (size_t i = 0; i < count; ++i) {
    Buffer buffer = pool.acquire();
    std::fill_n(buffer.data(), size, static_cast<std::byte>(i + 1));
    buffer.set_size(size);
    file.append(std::move(buffer));
  }
}

void expect_errno(const std::function<void()>& call, int error, const std::string& name,
                  const std::string& text) {
  try {
    call();
    ADD_FAILURE() << "no error";
  } catch (const Error& caught) {
    EXPECT_EQ(caught.code(), ErrorCode::kIo) << caught.what();
    EXPECT_EQ(caught.sys_errno(), error) << caught.what();
    EXPECT_EQ(std::filesystem::path(caught.file()).filename(),
              std::filesystem::path(name).filename());
    // The message has the system's reason only once.
    const std::string what = caught.what();
    EXPECT_NE(what.find(text), std::string::npos) << what;
    const std::string why = std::strerror(error);
    EXPECT_EQ(what.find(why), what.rfind(why)) << what;
  }
}

}  // namespace tilestone
