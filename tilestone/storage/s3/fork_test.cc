// ThreadSanitizer does not support threads that begin in a forked child.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tilestone/base/error.h"
#include "tilestone/storage/s3/client.h"
#include "tilestone/storage/s3/local_server_testing.h"

namespace tilestone::s3 {
namespace fork_test {

Deadline in_time() { return Deadline::after(std::chrono::seconds(20)); }

std::optional<std::string> put_one(Client& client) {
  return client.put("k", {as_bytes("abc")}, {}, {}, in_time()).wait();
}

TEST(Fork, ChildHasConnectionsOfItsOwn) {
  LocalServer server([](const ServedRequest&) { return ServedAnswer{.headers = {{"etag", "e"}}}; });
  Client client(config_from({{"AWS_ACCESS_KEY_ID", "i"},
                             {"AWS_SECRET_ACCESS_KEY", "s"},
                             {"AWS_ENDPOINT_URL", server.url()}}),
                "bucket");
  put_one(client);
  auto pending = client.get_beginning("k", in_time());
  const pid_t child = ::fork();
  if (child == 0) {
    bool good = put_one(client) == "e";
    try {
      pending.wait();
      good = false;
    } catch (const Error& error) {
      good = good && error.code() == ErrorCode::kInvalidArgument;
    }
    ::_exit(good ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  pending.wait();
  put_one(client);
  EXPECT_EQ(server.connections(), 2);
}

}  // namespace fork_test
}  // namespace tilestone::s3
