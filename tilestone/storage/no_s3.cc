#include "tilestone/base/error.h"
#include "tilestone/storage/object_store.h"

namespace tilestone {

void check_store_url(const std::string& url) {
  if (registered_opener(url)) return;
  throw Error(ErrorCode::kUnsupported, "this build of Tilestone has no S3")
      .with_file(url)
      .with_hint(
          "install a wheel, or build it with the CMake option TILESTONE_S3=ON, which needs libcurl "
          "and pugixml");
}

void set_spare_certificates(const std::string&) {}

std::string object_store_problem() { return "this build of Tilestone has no S3"; }

std::shared_ptr<Storage> object_store(const std::string& url) {
  if (const StoreOpener open = registered_opener(url)) return open(url);
  check_store_url(url);
  return nullptr;
}

}  // namespace tilestone
