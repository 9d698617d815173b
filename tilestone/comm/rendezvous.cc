// How to tell which rank is behind. Rank r is behind rank q if q has already made r's call and r
// has not made q's call: q went on, and r is late or repeats a call. There are two kinds of
// evidence, the stronger one first:
//
// 1. the calls since the last call that all ranks made. Both ranks started there, so a call in this
//    list was made by one rank and not by the other;
// 2. all recent calls, if the first kind is inconclusive: then a rank repeats an earlier call. Two
//    different calls at one location, such as save and load, are no such evidence: then the program
//    makes the wrong call on some rank, and if the others waited for it, they would wait in vain.
//
// A program that uses the same locations alternately gives evidence for both sides. With evidence
// of the first kind, the side with fewer calls since then is behind; if they are equal, the side
// with fewer ranks. Letting one side wait is right even if it is the wrong side, because then the
// two sides approach each other; if both failed, they would stay apart. With evidence of the second
// kind, no rank is known to be behind. All ranks fail, and their next calls give evidence of the
// first kind.
#include <algorithm>
#include <map>

#include "tilestone/base/checksum.h"
#include "tilestone/comm/operation_internal.h"
#include "tilestone/comm/rendezvous_internal.h"

namespace tilestone::comm_internal {
namespace {

using Hellos = std::vector<std::optional<Hello>>;

// Whether `call` is one of the last `newest` calls of `by`.
bool made(const Hello& by, const Hello& call, uint64_t newest) {
  const auto count = static_cast<ptrdiff_t>(std::min<uint64_t>(newest, by.recent.size()));
  const auto end = by.recent.begin() + count;
  return std::find(by.recent.begin(), end, fingerprint(call.work, call.location)) != end;
}

class Rendezvous {
 public:
  explicit Rendezvous(const Hellos& hellos) : hellos_(hellos) {
    std::map<std::string, size_t> views;
    for (size_t rank = 0; rank < hellos.size(); ++rank) {
      if (!hellos[rank]) continue;
      if (hellos[rank]->may_return) {
        ++away_;
        continue;
      }
      ++here_;
      const auto [view, fresh] = views.emplace(view_of(*hellos[rank]), views_.size());
      if (fresh) views_.push_back({&*hellos[rank], {}});
      views_[view->second].ranks.push_back(rank);
    }
  }

  std::vector<Fate> fates() const {
    std::vector<Fate> fates(hellos_.size(), Fate::kWait);
    if (all_agree()) {
      if (complete()) fates.assign(hellos_.size(), anyone_left() ? Fate::kLeft : Fate::kGo);
      if (only_others_are_away()) fates.assign(hellos_.size(), Fate::kAway);
      return fates;
    }
    bool any = false;
    for (const View& view : views_) {
      if (!is_behind(view)) continue;
      for (size_t rank : view.ranks) fates[rank] = Fate::kBehind;
      any = true;
    }
    if (!any && complete()) fates.assign(hellos_.size(), Fate::kMismatch);
    return fates;
  }

 private:
  // Ranks with equal hellos. There are only a few views, even if there are many ranks.
  struct View {
    const Hello* hello;
    std::vector<size_t> ranks;  // ascending
  };

  // A string, because comparing vectors of bytes gives a warning with GCC 12 at -O3.
  static std::string view_of(Hello hello) {
    hello.nonce = hello.last_operation = 0;
    hello.since_agreed = {};
    const Bytes encoded = hello.encode();
    return {reinterpret_cast<const char*>(encoded.data()), encoded.size()};
  }

  bool complete() const { return here_ == hellos_.size(); }

  bool only_others_are_away() const {
    return here_ > 0 && away_ > 0 && here_ + away_ == hellos_.size();
  }

  bool anyone_left() const {
    return std::any_of(hellos_.begin(), hellos_.end(),
                       [](const auto& hello) { return hello && hello->left; });
  }

  // A rank that names no location matches every other rank, so all ranks are compared with one that
  // names a location.
  bool all_agree() const {
    const auto named = std::find_if(views_.begin(), views_.end(),
                                    [](const View& view) { return !view.hello->location.empty(); });
    const View* const measure = named != views_.end() ? &*named : views_.data();
    return std::all_of(views_.begin(), views_.end(),
                       [&](const View& view) { return same_call(*view.hello, *measure->hello); });
  }

  bool is_behind(const View& view) const {
    return std::any_of(views_.begin(), views_.end(), [&](const View& other) {
      return !same_call(*view.hello, *other.hello) && is_behind(view, other);
    });
  }

  bool is_behind(const View& view, const View& other) const {
    const Hello& r = *view.hello;
    const Hello& q = *other.hello;
    if (r.agreed == q.agreed) {
      const bool q_made_it = made(q, r, q.since), r_made_it = made(r, q, r.since);
      if (q_made_it != r_made_it) return q_made_it;
      if (q_made_it) return loses_tie(r, q);
    }
    if (r.location == q.location) return false;
    return made(q, r, kMaxRecentCalls) && !made(r, q, kMaxRecentCalls);
  }

  bool loses_tie(const Hello& r, const Hello& q) const {
    if (r.since != q.since) return r.since < q.since;
    if (!complete()) return false;
    const auto [rs, r_lowest] = company(r);
    const auto [qs, q_lowest] = company(q);
    return rs != qs ? rs < qs : r_lowest > q_lowest;
  }

  // The number of ranks in this call, and the lowest of them.
  std::pair<size_t, size_t> company(const Hello& hello) const {
    size_t count = 0, lowest = hellos_.size();
    for (const View& view : views_) {
      if (!same_call(*view.hello, hello)) continue;
      count += view.ranks.size();
      lowest = std::min(lowest, view.ranks.front());
    }
    return {count, lowest};
  }

  const Hellos& hellos_;
  size_t here_ = 0, away_ = 0;
  std::vector<View> views_;
};

}  // namespace

uint64_t fingerprint(const std::string& work, const std::string& location) {
  return xxh3_64(as_bytes(work + '\n' + location));
}

std::string Hello::name() const { return location.empty() ? work : work + " at " + location; }

bool same_call(const Hello& a, const Hello& b) {
  const bool locations_fit = a.location == b.location || a.location.empty() || b.location.empty();
  return a.work == b.work && locations_fit;
}

Bytes Hello::encode() const {
  ByteWriter writer;
  writer.u64(nonce);
  writer.u64(last_operation);
  writer.u64(agreed);
  writer.u64(since);
  writer.u64(static_cast<uint64_t>(since_agreed.count()));
  writer.string(work);
  writer.string(location);
  writer.varint(recent.size());
  for (uint64_t call : recent) writer.u64(call);
  return std::move(writer).take();
}

Hello Hello::decode(ByteView bytes) {
  ByteReader reader(bytes, "hello of a rank");
  Hello hello;
  hello.nonce = reader.u64();
  hello.last_operation = reader.u64();
  hello.agreed = reader.u64();
  hello.since = reader.u64();
  hello.since_agreed = std::chrono::milliseconds(reader.u64());
  hello.work = reader.string();
  hello.location = reader.string();
  for (uint64_t count = reader.count(8); count > 0; --count) hello.recent.push_back(reader.u64());
  reader.expect_end();
  return hello;
}

std::vector<Fate> decide(const Hellos& hellos) { return Rendezvous(hellos).fates(); }

std::string who_is_where(const Hellos& hellos) {
  std::map<std::string, std::vector<int>> calls;
  for (int rank = 0; rank < static_cast<int>(hellos.size()); ++rank) {
    if (hellos[rank] && !hellos[rank]->may_return) calls[hellos[rank]->name()].push_back(rank);
  }
  std::vector<std::pair<int, std::string>> parts;
  for (const auto& [name, ranks] : calls) {
    parts.emplace_back(ranks.front(), rank_list(ranks) + ": " + name);
  }
  std::sort(parts.begin(), parts.end());
  std::string text;
  for (const auto& part : parts) text += (text.empty() ? "" : "; ") + part.second;
  return text;
}

}  // namespace tilestone::comm_internal
