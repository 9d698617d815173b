#include "tilestone/base/call_scope.h"

#include <utility>

namespace tilestone {
namespace {

thread_local void* current_call = nullptr;

}  // namespace

CallScope::CallScope(void* call) : before_(std::exchange(current_call, call)) {}

CallScope::~CallScope() { current_call = before_; }

void* CallScope::current() { return current_call; }

}  // namespace tilestone
