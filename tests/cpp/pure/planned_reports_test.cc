// When a rank reports the tensors of a plan: those of a bucket together.
#include "negotiation/planned_reports.h"

#include <vector>

#include "check.h"

namespace hororing_test {
namespace {

using namespace hororing;

constexpr TimeNs kWait = 10 * kMillisecond;

PlannedReports Planned() {
  PlannedReports planned;
  planned.Learn(0, {{{1, 2, 3}, kWait}, {{4, 5}, 2 * kWait}});
  return planned;
}

TEST(a_bucket_is_reported_when_it_is_complete) {
  PlannedReports planned = Planned();
  CHECK(planned.any());
  CHECK_EQ(planned.due(), kForever);
  for (TimeNs begin = 0; begin < 3 * kSecond; begin += kSecond) {
    planned.Add(1, begin);
    planned.Add(3, begin + 1);
    CHECK_EQ(planned.due(), begin + kWait);
    planned.Add(2, begin + 2);
    CHECK_EQ(planned.due(), TimeNs{0});
    planned.Reported();
    CHECK_EQ(planned.due(), kForever);
    planned.Add(5, begin + 3);
    CHECK_EQ(planned.due(), begin + 3 + 2 * kWait);
    planned.Add(4, begin + 4);
    CHECK_EQ(planned.due(), TimeNs{0});
    planned.Reported();
  }
}

// Somebody waited for the first, say.
TEST(what_was_reported_before_is_not_waited_for_again) {
  PlannedReports planned = Planned();
  planned.Add(1, kSecond);
  planned.Reported();
  planned.Add(2, kSecond);
  CHECK_EQ(planned.due(), kSecond + kWait);
  planned.Add(3, kSecond);
  CHECK_EQ(planned.due(), TimeNs{0});
}

TEST(buckets_of_which_tensors_come_by_turns_each_have_their_time) {
  PlannedReports planned = Planned();
  planned.Add(4, kSecond);
  CHECK_EQ(planned.due(), kSecond + 2 * kWait);
  planned.Add(1, kSecond + kMillisecond);
  CHECK_EQ(planned.due(), kSecond + kMillisecond + kWait);
}

TEST(a_step_without_one_of_the_tensors_is_over_when_the_next_one_begins) {
  PlannedReports planned = Planned();
  planned.Add(1, kSecond);
  planned.Add(2, kSecond);
  planned.Reported();
  const TimeNs next = kSecond + kWait / 2;
  planned.Add(2, next);
  CHECK_EQ(planned.due(), next + kWait);
  planned.Add(3, next);
  CHECK_EQ(planned.due(), next + kWait);
  planned.Add(1, next);
  CHECK_EQ(planned.due(), TimeNs{0});
}

// Even if the first to come is the one that did not.
TEST(what_came_long_ago_is_of_another_step) {
  PlannedReports planned = Planned();
  planned.Add(4, kSecond);
  planned.Reported();
  planned.Add(5, kSecond + 2 * kWait + 1);
  CHECK(planned.due() > 0);
  planned.Add(4, kSecond + 3 * kWait);
  CHECK_EQ(planned.due(), TimeNs{0});
}

TEST(what_is_in_no_bucket_waits_for_none) {
  PlannedReports planned = Planned();
  planned.Add(0, 7);
  planned.Add(9, 8);
  CHECK_EQ(planned.due(), kForever);
  CHECK_EQ(planned.others().count, size_t{2});
  CHECK_EQ(planned.others().first_ns, TimeNs{7});
  planned.Reported();
  CHECK_EQ(planned.others().count, size_t{0});
}

TEST(sets_have_plans_of_their_own_which_take_the_place_of_older_ones) {
  PlannedReports planned = Planned();
  planned.Learn(7, {{{11, 12}, kWait}});
  planned.Learn(0, {{{1}, kWait}});
  planned.Add(2, kSecond);
  CHECK_EQ(planned.others().count, size_t{1});
  planned.Add(11, kSecond);
  planned.Add(12, kSecond);
  CHECK_EQ(planned.due(), TimeNs{0});
  planned.Learn(7, {});
  CHECK_EQ(planned.due(), kForever);
  CHECK(planned.any());
  planned.Learn(0, {});
  CHECK(!planned.any());
  planned.Add(1, kSecond);
  CHECK_EQ(planned.others().count, size_t{1});
}

}  // namespace
}  // namespace hororing_test
