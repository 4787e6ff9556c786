// The main function of all C++ test programs.
#include "check.h"

int main(int argc, char** argv) { return hororing_test::RunAll(argc, argv); }
