// The command line, for the console script of the Python package.
#include "python/src/bindings.h"
#include "tilestone/cli/run.h"

namespace tilestone::python {

void bind_cli(nb::module_& m) {
  m.def(
      "cli",
      [](const std::vector<nb::bytes>& words) {
        std::vector<const char*> argv;
        for (const nb::bytes& word : words) argv.push_back(word.c_str());
        nb::gil_scoped_release released;
        return cli::run(static_cast<int>(argv.size()), argv.data());
      },
      nb::arg("argv"),
      "Runs one command; returns its exit code. argv[0] is the program's name; all words are as "
      "the system passes them.");
}

}  // namespace tilestone::python
