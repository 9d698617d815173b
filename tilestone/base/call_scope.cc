#include "tilestone/base/call_scope.h"

#include <utility>

namespace tilestone {
namespace {

thread_local WorkedFor of_this_thread;

}  // namespace

CallScope::CallScope(WorkedFor what) : before_(std::exchange(of_this_thread, what)) {}

CallScope::~CallScope() { of_this_thread = before_; }

WorkedFor CallScope::current() { return of_this_thread; }

}  // namespace tilestone
