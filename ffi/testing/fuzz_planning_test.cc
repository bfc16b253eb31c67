#include "ffi/planning/handlers.h"
#include "ffi/testing/fuzz.h"

int main(int argc, char** argv) {
  return moe_lb::testing::FuzzMain(moe_lb::PlanningRegistrations(), argc, argv, 1000000);
}
