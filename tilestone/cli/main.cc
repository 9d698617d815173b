#include "tilestone/cli/run.h"

int main(int argc, char** argv) { return tilestone::cli::run(argc, argv); }
