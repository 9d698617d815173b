// A checkpoint opened for reading.
#include "python/src/bindings.h"
#include "python/src/report.h"
#include "python/src/writable.h"
#include "tilestone/engine/checkpoint/verify_hashes_internal.h"
#include "tilestone/engine/commit/removal.h"
#include "tilestone/engine/run/resources_internal.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;

void bind_reports(nb::module_& m) {
  bind_report<Damage>(m, "Damage", "A damaged part of a checkpoint.",
                      {"file", "offset", "key", "problem"});
  bind_report<ShortFile>(m, "ShortFile", "A data file that is shorter than it should be.",
                         {"file", "size", "expected", "keys"});
  bind_report<VerifyReport>(m, "VerifyReport", "What verify checked and found.",
                            {"ok", "files", "items", "bytes", "damages"})
      .def_prop_ro("ok", &VerifyReport::ok, "Whether nothing is damaged.");
}

void bind_repair(nb::module_& m) {
  bind_report<RepairReport>(m, "RepairReport", "What a repair has repaired, and what is left.",
                            {"mended", "now"});
  m.def(
      "repair",
      [](const nb::bytes& path, OpenOptions options, nb::handle progress) {
        const Location location(path_of(path));
        const ProgressFn callback = to_progress(progress);
        return without_gil([&](const Stop& stop) {
          options.interrupt = stop;
          return repair(location, options, callback);
        });
      },
      "path"_a, "options"_a, "progress"_a.none());
}

void bind_leftovers(nb::module_& m) {
  bind_report<Leftover>(m, "Leftover", "A file that the checkpoint at its location does not need.",
                        {"name", "size", "what", "why"});
  m.def(
      "leftovers",
      [](const nb::bytes& path, bool remove, bool force, bool follow_links) {
        const Location location = location_of(path, follow_links);
        return without_gil([&] {
          return remove ? remove_leftovers(location, force) : find_leftovers(location, force);
        });
      },
      "path"_a, "remove"_a, "force"_a, "follow_links"_a);
}

// integrity.json: files and problems that this rank has found, and whether it looks like an attack.
void bind_hashes(nb::module_& m) {
  m.def(
      "check_hashes",
      [](const nb::bytes& path, const std::string& save_id, size_t rank, size_t ranks) {
        const Location location = location_of(path, false);
        std::vector<std::tuple<std::string, std::string, bool>> found;
        without_gil([&] {
          ThreadPool threads(engine::thread_count(0));
          for (Damage& one :
               engine::check_hashes(location.storage(), save_id, threads, rank, ranks)) {
            found.emplace_back(std::move(one.file), std::move(one.problem), one.unsafe);
          }
        });
        return found;
      },
      "path"_a, "save_id"_a, "rank"_a, "ranks"_a);
  m.def(
      "sha256_of_file",
      [](const nb::bytes& folder, const std::string& name) {
        const Location location = location_of(folder, false);
        return without_gil([&] { return engine::sha256_of_file(location.storage(), name); });
      },
      "folder"_a, "name"_a);
}

void bind_removal(nb::module_& m) {
  bind_report<Removal>(m, "Removal", "What remove_keys has removed.", {"keys", "files", "bytes"});
  m.def(
      "remove_keys",
      [](const nb::bytes& path, const std::string& prefix, double seconds) {
        const Location location = location_of(path, false);
        return without_gil(
            [&](const Stop& stop) { return remove_keys(location, prefix, {seconds, stop}); });
      },
      "path"_a, "prefix"_a, "seconds"_a);
}

const StoredTensor& tensor_of(const Checkpoint& checkpoint, const std::string& key) {
  if (const StoredTensor* tensor = checkpoint.metadata().find_tensor(key)) return *tensor;
  const StoredObject* object = checkpoint.metadata().find_object(key);
  if (object != nullptr) expect_supported(*object);
  throw Error(ErrorCode::kNotFound, "the checkpoint holds no tensor with this key").with_key(key);
}

// Reads of more bytes run as long calls, which can be interrupted.
constexpr uint64_t kLongRead = 8u << 20;

WithoutGil::Length length_of_read(const Checkpoint& checkpoint, const std::string& key,
                                  const std::optional<Box>& box) {
  const StoredTensor* tensor = checkpoint.metadata().find_tensor(key);
  if (tensor == nullptr) return WithoutGil::kShort;
  const Dims& shape = box ? box->shape : tensor->shape;
  const auto most = static_cast<int64_t>(kLongRead / itemsize(tensor->dtype));
  return numel(shape) > most ? WithoutGil::kLong : WithoutGil::kShort;
}

WithoutGil::Length length_of_object(const Checkpoint& checkpoint, const std::string& key) {
  const StoredObject* object = checkpoint.metadata().find_object(key);
  const bool is_long = object != nullptr && object->at.length > kLongRead;
  return is_long ? WithoutGil::kLong : WithoutGil::kShort;
}

void bind_keys(nb::class_<Checkpoint>& bound) {
  bound.def("keys", &Checkpoint::keys)
      .def("tensor_keys",
           [](const Checkpoint& c) {
             std::vector<std::string> keys;
             for (const StoredTensor& t : c.metadata().tensors) keys.push_back(t.key);
             return keys;
           })
      .def("object_keys",
           [](const Checkpoint& c) {
             std::vector<std::string> keys;
             for (const StoredObject& o : c.metadata().objects) keys.push_back(o.key);
             return keys;
           })
      .def(
          "is_tensor",
          [](const Checkpoint& c, const std::string& key) {
            return c.metadata().find_tensor(key) != nullptr;
          },
          "key"_a)
      .def(
          "is_object",
          [](const Checkpoint& c, const std::string& key) {
            return c.metadata().find_object(key) != nullptr;
          },
          "key"_a)
      .def(
          "path_of",
          [](const Checkpoint& c, const std::string& key) {
            if (const StoredTensor* t = c.metadata().find_tensor(key)) return t->path;
            const StoredObject* o = c.metadata().find_object(key);
            return o == nullptr ? Path() : o->path;
          },
          "key"_a, "The path of the key in the writer's tree; empty if it is not recorded.");
}

void bind_tensors(nb::class_<Checkpoint>& bound) {
  bound
      .def(
          "dtype",
          [](const Checkpoint& c, const std::string& key) {
            return to_string(tensor_of(c, key).dtype);
          },
          "key"_a)
      .def(
          "shape",
          [](const Checkpoint& c, const std::string& key) { return tensor_of(c, key).shape; },
          "key"_a)
      .def(
          "boxes",
          [](const Checkpoint& c, const std::string& key) {
            std::vector<Box> boxes;
            for (const StoredChunk& chunk : tensor_of(c, key).chunks) boxes.push_back(chunk.box);
            return boxes;
          },
          "key"_a)
      .def(
          "files_of",
          [](const Checkpoint& c, const std::string& key) {
            std::vector<std::string> files;
            for (const StoredChunk& chunk : tensor_of(c, key).chunks) {
              files.push_back(c.metadata().files.at(chunk.at.file));
            }
            return files;
          },
          "key"_a)
      .def(
          "read",
          [](const Checkpoint& c, const std::string& key, const std::optional<Box>& box) {
            return without_gil(
                [&](const Stop& stop) { return c.with_interrupt(stop).read(key, box); },
                length_of_read(c, key, box));
          },
          "key"_a, "box"_a.none())
      .def(
          "read_many",
          [](const Checkpoint& c, const std::vector<std::string>& keys) {
            return without_gil(
                [&](const Stop& stop) { return c.with_interrupt(stop).read_many(keys); });
          },
          "keys"_a)
      .def(
          "read_into",
          [](const Checkpoint& c, const std::string& key, const std::optional<Box>& box,
             const TensorView& target) {
            check_writable(target, key);
            without_gil(
                [&](const Stop& stop) { c.with_interrupt(stop).read_into(key, box, target); },
                length_of_read(c, key, box));
          },
          "key"_a, "box"_a.none(), "target"_a)
      .def(
          "read_parts",
          [](const Checkpoint& c, const std::vector<std::string>& keys,
             const std::vector<Box>& boxes, const std::vector<TensorView>& targets) {
            std::vector<Checkpoint::Part> parts;
            StateDict to_fill;
            for (size_t i = 0; i < keys.size(); ++i) {
              parts.push_back({keys[i], boxes.at(i), targets.at(i)});
              to_fill.entries().emplace_back(keys[i], targets[i]);
            }
            check_writable(to_fill);
            without_gil([&](const Stop& stop) { c.with_interrupt(stop).read_parts(parts); });
          },
          "keys"_a, "boxes"_a, "targets"_a,
          "Reads a box of a tensor into each target. The lists have the same length.");
}

void bind_values(nb::class_<Checkpoint>& bound) {
  bound
      .def(
          "read_object",
          [](const Checkpoint& c, const std::string& key, nb::handle bridge) {
            const Entered entered;
            const Value value = without_gil(
                [&](const Stop& stop) { return c.with_interrupt(stop).read_object(key); },
                length_of_object(c, key));
            return from_value(value, nb::none(), Bridge(bridge));
          },
          "key"_a, "bridge"_a)
      .def(
          "tensor_attributes",
          [](const Checkpoint& c, const std::string& key, nb::handle bridge) {
            nb::typed<nb::dict, nb::str, nb::object> attributes;
            const StoredTensor& tensor = tensor_of(c, key);
            const auto found = c.metadata().attributes.find(tensor.key);
            if (found == c.metadata().attributes.end()) return attributes;
            for (const auto& [name, value] : found->second) {
              attributes[python_text(name)] = from_value(value, nb::none(), Bridge(bridge));
            }
            return attributes;
          },
          "key"_a, "bridge"_a)
      .def(
          "common",
          [](const Checkpoint& c, nb::handle bridge) -> nb::object {
            const Entered entered;
            const std::optional<Value> value =
                without_gil([&](const Stop& stop) { return c.with_interrupt(stop).common(); });
            if (!value) return nb::none();
            return from_value(*value, nb::none(), Bridge(bridge));
          },
          "bridge"_a)
      .def(
          "read_object_bytes",
          [](const Checkpoint& c, const std::string& key) {
            const Bytes bytes = without_gil(
                [&](const Stop& stop) { return c.with_interrupt(stop).read_object_bytes(key); },
                length_of_object(c, key));
            return python_bytes(bytes);
          },
          "key"_a);
}

void bind_facts(nb::class_<Checkpoint>& bound) {
  bound.def_prop_ro("files", [](const Checkpoint& c) { return c.metadata().files; })
      .def_prop_ro("writer", [](const Checkpoint& c) { return c.metadata().writer; })
      .def_prop_ro("save_id", [](const Checkpoint& c) { return c.metadata().save_id; })
      .def_prop_ro("rank_local", [](const Checkpoint& c) { return c.metadata().rank_local; })
      .def_prop_ro("format", [](const Checkpoint& c) { return c.format_name(); })
      .def_prop_ro("dialect", [](const Checkpoint& c) { return c.dialect_name(); })
      .def_prop_ro("world_size",
                   [](const Checkpoint& c) -> std::optional<int> {
                     if (!c.save_record()) return std::nullopt;
                     return c.save_record()->world_size;
                   })
      .def_prop_ro("hosts",
                   [](const Checkpoint& c) {
                     std::vector<nb::str> hosts;
                     if (!c.save_record()) return hosts;
                     for (const std::string& host : c.save_record()->hosts) {
                       hosts.push_back(python_text(host));
                     }
                     return hosts;
                   })
      .def_prop_ro("save_timings",
                   [](const Checkpoint& c) {
                     nb::typed<nb::list, nb::typed<nb::dict, nb::str, double>> timings;
                     if (!c.save_record()) return timings;
                     for (const auto& steps : c.save_record()->steps) {
                       nb::dict of_rank;
                       for (const SaveRecord::Step& step : steps) {
                         of_rank[python_text(step.name)] = step.seconds;
                       }
                       timings.append(of_rank);
                     }
                     return timings;
                   })
      .def_prop_ro("attributes",
                   [](const Checkpoint& c) {
                     nb::typed<nb::dict, nb::str, nb::str> attributes;
                     if (!c.save_record()) return attributes;
                     for (const auto& [name, value] : c.save_record()->attributes) {
                       attributes[python_text(name)] = python_text(value);
                     }
                     return attributes;
                   })
      .def_prop_ro("tensor_bytes", [](const Checkpoint& c) { return c.metadata().tensor_bytes(); });
}

}  // namespace

void bind_checkpoint(nb::module_& m) {
  bind_reports(m);
  bind_repair(m);
  bind_leftovers(m);
  bind_removal(m);
  bind_hashes(m);
  nb::class_<Checkpoint> bound(m, "Checkpoint");
  bound.def_static(
      "open",
      [](const nb::bytes& path, OpenOptions options) {
        const Location location(path_of(path));
        return without_gil([&](const Stop& stop) {
          options.interrupt = stop;
          return Checkpoint::open(location, options);
        });
      },
      "path"_a, "options"_a);
  bound.def("mapped", [](const Checkpoint& c) { return without_gil([&] { return c.mapped(); }); });
  bind_keys(bound);
  bind_tensors(bound);
  bind_values(bound);
  bind_facts(bound);
  bound.def(
      "verify",
      [](const Checkpoint& c, nb::handle progress) {
        const ProgressFn callback = to_progress(progress);
        return without_gil(
            [&](const Stop& stop) { return c.with_interrupt(stop).verify(callback); });
      },
      "progress"_a.none());
}

}  // namespace tilestone::python
