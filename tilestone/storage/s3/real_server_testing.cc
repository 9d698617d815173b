#include "tilestone/storage/s3/real_server_testing.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <random>
#include <thread>

#include "tilestone/base/error.h"
#include "tilestone/storage/s3/http.h"

namespace tilestone::s3 {
namespace {

constexpr const char* kKeyId = "AKIDTESTS";
constexpr const char* kSecret = "SECRETTESTS";
constexpr size_t kPorts = 10;

std::filesystem::path fresh_folder() {
  std::string name = std::filesystem::temp_directory_path() / "tilestone_s3_XXXXXX";
  if (::mkdtemp(name.data()) == nullptr) throw Error(ErrorCode::kIo, "no folder").with_errno(errno);
  return name;
}

// Below those that the system gives to outgoing connections, which could take one before its server
// does. All different, because all are open at once.
std::vector<int> free_ports() {
  std::random_device chance;
  std::vector<int> ports, sockets;
  while (ports.size() < kPorts) {
    const auto port = static_cast<uint16_t>(10'000 + chance() % 22'000);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    sockets.push_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const auto* const any = reinterpret_cast<const sockaddr*>(&address);
    if (::bind(sockets.back(), any, sizeof address) == 0) ports.push_back(port);
  }
  for (const int each : sockets) ::close(each);
  return ports;
}

std::string program(const char* name) {
  return fmt::format("{}/{}", TILESTONE_TEST_PROGRAMS, name);
}

void write_seaweed_config(const std::filesystem::path& path) {
  std::ofstream(path) << fmt::format(
      R"({{"identities":[{{"name":"tests","credentials":[{{"accessKey":"{0}","secretKey":"{1}"}},)"
      R"({{"accessKey":"{0}2","secretKey":"{1}2"}}],)"
      R"("actions":["Admin","Read","Write","List","Tagging"]}}]}})",
      kKeyId, kSecret);
}

void make_certificate(const std::filesystem::path& folder) {
  const std::string command = fmt::format(
      "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj "
      "/CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1 -keyout {0}/key.pem -out {0}/cert.pem "
      "2>/dev/null",
      folder.string());
  if (std::system(command.c_str()) != 0) throw Error(ErrorCode::kIo, "no certificate was made");
}

}  // namespace

RealServer::RealServer(Kind kind) : kind_(kind), folder_(fresh_folder()) {
  std::filesystem::create_directory(folder_ / "data");
  if (kind_ == Kind::kSeaweed) write_seaweed_config(folder_ / "s3.json");
  if (kind_ == Kind::kRcloneTls) make_certificate(folder_);
  ports_ = free_ports();
  start();
}

RealServer::~RealServer() {
  kill_now();
  std::filesystem::remove_all(folder_);
}

std::string RealServer::url() const {
  return fmt::format("http{}://127.0.0.1:{}", kind_ == Kind::kRcloneTls ? "s" : "", ports_[0]);
}

std::string RealServer::certificate() const { return folder_ / "cert.pem"; }

Config RealServer::config() const { return config_for(url()); }

Config RealServer::config_for(const std::string& endpoint) const {
  Config config = config_from({{"AWS_ACCESS_KEY_ID", kKeyId},
                               {"AWS_SECRET_ACCESS_KEY", kSecret},
                               {"AWS_ENDPOINT_URL", endpoint},
                               {"AWS_EC2_METADATA_DISABLED", "true"}});
  config.first_pause = std::chrono::milliseconds(5);
  config.longest_pause = std::chrono::milliseconds(100);
  return config;
}

void RealServer::create_bucket(const std::string& name) const {
  HttpRequest request = {.method = "PUT", .url = url() + "/" + name, .headers = {}};
  request.headers["host"] = fmt::format("127.0.0.1:{}", ports_[0]);
  sign(request.headers, "PUT", "/" + name, {}, {kKeyId, kSecret, ""}, "us-east-1",
       std::chrono::system_clock::now());
  HttpSettings settings;
  if (kind_ == Kind::kRcloneTls) settings.ca_bundle = certificate();
  const HttpAnswer answer = fetch(request, settings);
  if (answer.status != 200) throw Error(ErrorCode::kIo, "no bucket was made: " + answer.body);
}

std::vector<std::string> RealServer::command() const {
  const std::string data = folder_ / "data";
  if (kind_ != Kind::kSeaweed) {
    std::vector<std::string> words = {program("rclone"),
                                      "serve",
                                      "s3",
                                      data,
                                      "--addr",
                                      fmt::format("127.0.0.1:{}", ports_[0]),
                                      "--auth-key",
                                      fmt::format("{},{}", kKeyId, kSecret),
                                      "--config",
                                      "/dev/null",
                                      "--cache-dir",
                                      folder_ / "cache"};
    if (kind_ == Kind::kRcloneTls) {
      words.insert(words.end(), {"--cert", certificate(), "--key", folder_ / "key.pem"});
    }
    return words;
  }
  std::vector<std::string> words = {program("weed"),
                                    "mini",
                                    "-dir=" + data,
                                    "-ip=127.0.0.1",
                                    "-ip.bind=127.0.0.1",
                                    fmt::format("-s3.config={}/s3.json", folder_.string()),
                                    "-admin.ui=false",
                                    "-webdav=false",
                                    "-master.telemetry=false",
                                    "-s3.port.iceberg=0",
                                    "-s3.port.lance=0",
                                    "-volume.max=1000" /* each bucket takes some */};
  size_t next = 0;
  for (const char* const name : {"s3", "master", "volume", "filer", "admin"}) {
    words.push_back(fmt::format("-{}.port={}", name, ports_[next++]));
    words.push_back(fmt::format("-{}.port.grpc={}", name, ports_[next++]));
  }
  return words;
}

void RealServer::spawn() {
  const std::vector<std::string> words = command();
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const std::string log = folder_ / "log";
  process_ = ::fork();
  if (process_ != 0) return;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int file = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  ::dup2(file, 1);
  ::dup2(file, 2);
  ::execv(arguments[0], arguments.data());
  ::_exit(127);
}

bool RealServer::answers() const {
  HttpSettings settings = {.whole = std::chrono::milliseconds(1000)};
  if (kind_ == Kind::kRcloneTls) settings.ca_bundle = certificate();
  const HttpAnswer answer = fetch({.method = "GET", .url = url() + "/", .headers = {}}, settings);
  return answer.failure == Failure::kNone && answer.status < 500;
}

void RealServer::start() {
  spawn();
  for (int i = 0; i < 600; ++i) {
    if (answers()) return;
    if (::waitpid(process_, nullptr, WNOHANG) == process_) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  throw Error(ErrorCode::kIo,
              fmt::format("{} has not started; tools/setup installs it", command().front()));
}

void RealServer::kill_now() {
  if (process_ <= 0) return;
  ::kill(process_, SIGKILL);
  ::waitpid(process_, nullptr, 0);
  process_ = -1;
}

RealServer& seaweed() {
  static RealServer server(RealServer::Kind::kSeaweed);
  return server;
}

RealServer& rclone() {
  static RealServer server(RealServer::Kind::kRclone);
  return server;
}

}  // namespace tilestone::s3
