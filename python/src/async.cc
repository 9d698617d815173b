// Saves in the background.
#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "python/src/bindings.h"
#include "python/src/requests.h"
#include "tilestone/base/per_process.h"
#include "tilestone/engine/save/background_internal.h"
#include "tilestone/engine/session_internal.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;
using Seconds = std::chrono::duration<double>;

constexpr Seconds kEndTime{5};  // for abandoned saves, at the interpreter's end

// All saves of this process that have not finished, or have failed unnoticed. Without it, the
// thread that drops the last handle would wait for the save. It is never destroyed: threads may use
// it until the process ends.
class Saves {
 public:
  void add(const AsyncSave& save) {
    std::vector<AsyncSave> finished;
    const std::lock_guard lock(mutex_);
    for (const AsyncSave& one : saves_) {
      if (one.finished()) finished.push_back(one);
    }
    std::erase_if(saves_, [](const AsyncSave& one) {
      return one.finished() && !engine::OfAsyncSave::of(one).has_unheard_failure();
    });
    saves_.push_back(save);
  }
  std::vector<AsyncSave> all() const {
    const std::lock_guard lock(mutex_);
    return saves_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<AsyncSave> saves_;
};

// A forked child has no saves.
Saves& saves() {
  static const auto* const of_process =
      new PerProcess<Saves>([] { return std::make_unique<Saves>(); });
  return **of_process;
}

// Waits until the saves are durable and their threads have ended.
void wait_for_all(const std::vector<AsyncSave>& saves, Seconds time) {
  without_gil([&](const Stop& stop) {
    const Deadline deadline = Deadline::after(time).with_interrupt(stop);
    for (const AsyncSave& save : saves) {
      if (!save.durable().wait(deadline)) return;
    }
    while (!deadline.expired() &&
           !std::all_of(saves.begin(), saves.end(), [](const auto& s) { return s.finished(); })) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
}

std::vector<std::string> not_durable(const std::vector<AsyncSave>& saves) {
  std::vector<std::string> ids;
  for (const AsyncSave& save : saves) {
    if (!save.durable().done()) ids.push_back(save.save_id());
  }
  return ids;
}

// Waits for all saves, at most `seconds`; then abandons those that have not ended. Logs the
// failures of which the program does not know. Returns the ids of those that are stuck: their
// threads are left behind.
std::vector<std::string> end_saves(double seconds) {
  const std::vector<AsyncSave> open = saves().all();
  try {
    without_gil([&] {
      for (const AsyncSave& save : open) engine::OfAsyncSave::seal(save);
    });
    wait_for_all(open, Seconds(seconds));
  } catch (...) {
    for (const AsyncSave& save : open) save.abandon();
    throw;
  }
  if (!not_durable(open).empty()) {
    for (const AsyncSave& save : open) {
      engine::OfAsyncSave::of(save).abandon("was abandoned, because its program has ended");
    }
    wait_for_all(open, kEndTime);
  }
  without_gil([&] {
    for (const AsyncSave& save : open) engine::OfAsyncSave::of(save).log_failure();
  });
  return not_durable(open);
}

// `watched`: None, or an object with the methods watch(), delay_program(), started() and changed(),
// see tilestone/_torch/live.py.
std::shared_ptr<engine::LazyStaging> lazy_with(const nb::object& watched) {
  if (watched.is_none()) return nullptr;
  const auto kept = keep_alive(watched);
  const auto watch = [kept](const std::vector<engine::LiveTensor>& tensors) {
    return with_gil("watching the tensors of a save", [&] {
      nb::list given;
      for (const engine::LiveTensor& tensor : tensors) {
        const nb::handle owner = kept_object(tensor.data->owner);
        const nb::object memory = tensor.data->device != nullptr
                                      ? nb::borrow(device_object(*tensor.data))
                                      : nb::int_(reinterpret_cast<uintptr_t>(tensor.data->data));
        given.append(nb::make_tuple(nb::str(tensor.key->data(), tensor.key->size()),
                                    owner.is_valid() ? nb::borrow(owner) : nb::none(), memory));
      }
      std::vector<bool> answer;
      for (const nb::handle one : nb::list(kept_object(kept).attr("watch")(given))) {
        answer.push_back(nb::cast<bool>(one));
      }
      return answer;
    });
  };
  const auto delay = [kept] {
    return with_gil("ordering the streams of devices",
                    [&] { return nb::cast<bool>(kept_object(kept).attr("delay_program")()); });
  };
  const auto look = [kept] {
    return with_gil("looking at the tensors of a save", [&] {
      return nb::cast<std::optional<std::string>>(kept_object(kept).attr("changed")());
    });
  };
  return std::make_shared<engine::LazyStaging>(engine::WatchTensors{watch, delay}, look);
}

// Starts a save in a session. `watched`: of lazy staging, or None. `hold`: null if it isn't held.
AsyncSave* async_save(nb::handle session, const MakesSave& prepare, const nb::bytes& path,
                      double seconds, const AsyncOptions& async, const nb::object& watched,
                      const engine::SaveRequest* bare, const std::shared_ptr<engine::Hold>& hold) {
  const Entered entered;
  const auto lazy = lazy_with(watched);
  const SaveStart start = start_of(prepare, path, session, seconds, bare);
  std::optional<AsyncSave> save;
  try {
    without_gil([&](const Stop& stop) {
      save = engine::OfSession::async_save(*start.session, start.location, start.options, async,
                                           start.deadline.with_interrupt(stop), view_of(start.made),
                                           lazy, hold);
      saves().add(*save);
    });
  } catch (const Raised& raised) {  // a signal, perhaps after the save had been started
    if (save) save->abandon();
    say_rank(raised, start.rank, start.ranks);
    throw;
  }
  if (!watched.is_none()) {
    // Here, because Python could raise KeyboardInterrupt as soon as this returns.
    try {
      watched.attr("started")(nb::cast(AsyncSave(*save)));
    } catch (...) {
      save->abandon();
      throw;
    }
  }
  return new AsyncSave(*std::move(save));
}

// A step of which this thread only looks at the outcome needs no thread for the call.
WithoutGil::Length length_of(const Pending& step) {
  return step.done() ? WithoutGil::kShort : WithoutGil::kLong;
}

void bind_pending(nb::module_& m) {
  nb::class_<Pending>(m, "Pending", "A step of a save that ends on another thread.")
      .def("done", &Pending::done)
      .def(
          "result",
          [](const Pending& self, double seconds) {
            without_gil(
                [&](const Stop& stop) {
                  self.get(end_after(seconds).with_interrupt(stop), seconds);
                },
                length_of(self));
          },
          "seconds"_a)
      .def(
          "wait",
          [](const Pending& self) {
            without_gil(
                [&](const Stop& stop) { self.wait(Deadline::never().with_interrupt(stop)); },
                length_of(self));
          },
          "Returns once it has ended, well or not.")
      .def(
          "on_done",
          [](const Pending& self, const Told& callback) {
            self.on_done([kept = keep_alive(callback)] {
              with_gil("a callback of a save", [&] { kept_object(kept)(); });
            });
          },
          "callback"_a);
}

}  // namespace

void bind_async(nb::module_& m) {
  bind_pending(m);
  nb::class_<AsyncSave>(m, "AsyncSave", "A save that goes on in the background.")
      .def_prop_ro("save_id", &AsyncSave::save_id)
      .def_prop_ro("bytes", &AsyncSave::bytes)
      .def_prop_ro("skipped", &AsyncSave::skipped)
      .def_prop_ro("staged", &AsyncSave::staged)
      .def_prop_ro("durable", &AsyncSave::durable)
      .def(
          "seal",
          [](const AsyncSave& save) {
            without_gil([&] { engine::OfAsyncSave::seal(save); }, length_of(save.staged()));
          },
          "Ends lazy staging.")
      .def(
          "result", [](const AsyncSave& save) { return save.result(0); },
          "Once it is durable: what the save did.")
      .def(
          "expect_other_thread",
          [](const AsyncSave& save) {
            engine::OfAsyncSave::of(save).durable_state().expect_other_thread();
          },
          "Raises InvalidArgumentError in a callback of the save, which must not wait for it.")
      .def("abandon", &AsyncSave::abandon);
  nb::class_<engine::Hold>(m, "Hold", "Keeps a save from reporting and publishing what it wrote.")
      .def(nb::init<>())
      .def_prop_ro("written", [](const engine::Hold& hold) { return Pending(hold.written); })
      .def("release", [](const engine::Hold& hold) { hold.released->end(nullptr); });
  m.def("async_save", &async_save, "session"_a, "prepare"_a, "path"_a, "seconds"_a, "options"_a,
        "watched"_a.none(), "bare"_a.none(), "hold"_a.none());
  m.def("end_async_saves", &end_saves, "seconds"_a);
}

}  // namespace tilestone::python
