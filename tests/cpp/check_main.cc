// What every program of C++ tests is linked with.
#include "check.h"

int main(int argc, char** argv) { return hororing_test::RunAll(argc, argv); }
