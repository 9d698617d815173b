// Bridge: the Python functions that one call uses; what results show of themselves.
#include "python/src/bindings.h"

namespace tilestone::python {

nb::str shown(nb::handle self, const std::vector<const char*>& names) {
  nb::list parts;
  for (const char* name : names) {
    nb::object value = self.attr(name);
    if (PyList_Check(value.ptr())) value = nb::int_(nb::len(value));
    parts.append(nb::str("{}={!r}").format(name, value));
  }
  const nb::object all = nb::str(", ").attr("join")(parts);
  return nb::str(nb::str("{}({})").format(self.type().attr("__name__"), all));
}

Bridge::Bridge(nb::handle object)
    : for_load(nb::cast<bool>(object.attr("for_load"))),
      keeps_keys(nb::cast<bool>(object.attr("keeps_keys"))),
      everywhere(nb::cast<int>(object.attr("everywhere"))) {
  const std::pair<nb::handle*, const char*> members[] = {{&copied_back, "copied_back"},
                                                         {&describe, "describe"},
                                                         {&is_entity, "is_entity"},
                                                         {&optimizer_places, "optimizer_places"},
                                                         {&variable, "variable"},
                                                         {&check_container, "check_container"},
                                                         {&log_attributes, "log_attributes"},
                                                         {&replaced, "replaced"},
                                                         {&stand_in_of, "stand_in_of"},
                                                         {&restored, "restored"},
                                                         {&data_of, "data_of"},
                                                         {&rebuilt, "rebuilt"},
                                                         {&filled_by, "filled_by"},
                                                         {&note_filled, "note_filled"},
                                                         {&describe_in_value, "describe_in_value"},
                                                         {&pickle, "pickle"},
                                                         {&make_array, "make_array"},
                                                         {&make_variable, "make_variable"},
                                                         {&make_dtype, "make_dtype"},
                                                         {&make_ordered_dict, "make_ordered_dict"},
                                                         {&make_opaque, "make_opaque"}};
  nb::list kept;
  for (const auto& [member, name] : members) {
    const nb::object found = object.attr(name);
    kept.append(found);
    *member = found;
  }
  kept_ = keep_alive(kept);
}

}  // namespace tilestone::python
