#include "tilestone/base/deadline.h"

#include <algorithm>

namespace tilestone {
namespace {

using std::chrono::nanoseconds;
using Seconds = std::chrono::duration<double>;

// Past this a time is as good as never, and adding it to now() can't overflow.
constexpr Seconds kLongest = std::chrono::hours(24 * 365 * 100);

}  // namespace

Deadline Deadline::after(std::chrono::duration<double> time) {
  if (time >= kLongest) return never();
  const Clock::time_point now = Clock::now();
  // Written so that NaN, too, counts as already expired.
  if (!(time > Seconds::zero())) return Deadline(now);
  return Deadline(now + std::chrono::duration_cast<Clock::duration>(time));
}

nanoseconds Deadline::remaining() const {
  if (is_never()) return std::chrono::hours(24);
  return std::max(nanoseconds(0), std::chrono::duration_cast<nanoseconds>(when_ - Clock::now()));
}

Deadline Deadline::sooner(double fraction) const {
  if (is_never()) return *this;
  return after(Seconds(remaining()) * fraction);
}

}  // namespace tilestone
