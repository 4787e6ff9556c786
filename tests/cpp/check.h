// A small test harness (ADR 9): TEST registers a case, CHECK* record failures and go on, and
// main() (check_main.cc) runs all cases, those of one file, or those whose names contain a word.
//
//   ./engine_tests                       all
//   ./engine_tests mismatch --seed 7     some, with the seed of an earlier run
//   ./engine_tests --file soak_test      those of tests/cpp/engine/soak_test.cc, as ctest does
#pragma once

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

namespace hororing_test {

// ThreadSanitizer takes ten times as long, and races depend on neither types nor values: under it,
// tests repeat their steps for fewer of them.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kFew = true;
#else
inline constexpr bool kFew = false;
#endif

// AddressSanitizer finds memory errors as well with two ranks as with four.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// `all`; under ThreadSanitizer `few`, which are enough to find a race.
template <typename T>
std::vector<T> AllOrFew(std::vector<T> all, std::vector<T> few) {
  return kFew ? few : all;
}

struct Case {
  const char* file;
  const char* name;
  void (*body)();
};

inline std::vector<Case>& Cases() {
  static std::vector<Case> cases;
  return cases;
}

inline std::atomic<int>& Failures() {
  static std::atomic<int> failures{0};
  return failures;
}

inline unsigned& MutableSeed() {
  static unsigned seed =
      static_cast<unsigned>(std::chrono::system_clock::now().time_since_epoch().count() % 1000000);
  return seed;
}

// The seed of all randomness in a run; printed at its start.
inline unsigned Seed() { return MutableSeed(); }

struct Registration {
  Registration(const char* file, const char* name, void (*body)()) {
    Cases().push_back({file, name, body});
  }
};

// Callable from any thread of a test.
inline void Fail(const char* file, int line, const std::string& what) {
  ++Failures();
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

template <typename T>
std::string Show(const T& value) {
  std::ostringstream text;
  text.precision(17);
  text << value;
  return text.str();
}

template <typename A, typename B>
void CheckEqual(const char* file, int line, const char* what, const A& a, const B& b) {
  if (!(a == b)) Fail(file, line, std::string(what) + ": " + Show(a) + " != " + Show(b));
}

template <typename A, typename B, typename Tolerance>
void CheckNear(const char* file, int line, const char* what, A a, B b, Tolerance tolerance) {
  if (!(std::abs(a - b) <= tolerance)) {
    Fail(file, line, std::string(what) + ": " + Show(a) + " is not near " + Show(b));
  }
}

// "soak_test" of "/anywhere/soak_test.cc".
inline std::string Stem(const std::string& path) {
  const std::string name = path.substr(path.rfind('/') + 1);
  return name.substr(0, name.rfind('.'));
}

inline int RunAll(int argc, char** argv) {
  const char* only = "";
  std::string file;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--seed") == 0 && i + 1 < argc) {
      MutableSeed() = static_cast<unsigned>(std::atoi(argv[++i]));
    } else if (std::strcmp(argv[i], "--file") == 0 && i + 1 < argc) {
      file = argv[++i];
    } else {
      only = argv[i];
    }
  }
  std::printf("seed %u\n", Seed());
  int passed = 0, failed = 0;
  for (const Case& each : Cases()) {
    if (std::strstr(each.name, only) == nullptr) continue;
    if (!file.empty() && Stem(each.file) != file) continue;
    std::printf("%s ...\n", each.name);
    std::fflush(stdout);
    const int before = Failures();
    try {
      each.body();
    } catch (const std::exception& error) {
      Fail(each.name, 0, std::string("exception: ") + error.what());
    }
    (Failures() == before ? passed : failed) += 1;
    if (Failures() != before) std::printf("FAILED %s\n", each.name);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}

}  // namespace hororing_test

#define TEST(name)                                                                        \
  static void name();                                                                     \
  static const hororing_test::Registration registration_of_##name(__FILE__, #name, name); \
  static void name()

#define CHECK(condition)                                                                \
  do {                                                                                  \
    if (!(condition)) hororing_test::Fail(__FILE__, __LINE__, "CHECK(" #condition ")"); \
  } while (false)
#define CHECK_EQ(a, b) \
  hororing_test::CheckEqual(__FILE__, __LINE__, "CHECK_EQ(" #a ", " #b ")", (a), (b))
#define CHECK_NEAR(a, b, tolerance) \
  hororing_test::CheckNear(__FILE__, __LINE__, "CHECK_NEAR(" #a ", " #b ")", (a), (b), (tolerance))
#define CHECK_OK(status)                                                         \
  do {                                                                           \
    const auto& checked_status = (status);                                       \
    if (!checked_status.ok()) {                                                  \
      hororing_test::Fail(__FILE__, __LINE__,                                    \
                          "CHECK_OK(" #status "): " + checked_status.message()); \
    }                                                                            \
  } while (false)
