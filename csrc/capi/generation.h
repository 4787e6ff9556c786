// The generation of an elastic job that this process's engine belongs to.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/engine.h"

namespace hororing {

// Ends every wait of `engine` when that generation (0: not elastic) is over, or at once if that is
// known. Replaces the engine of an earlier call; null: none. Any thread; does not block.
void WatchGeneration(int64_t generation, const std::shared_ptr<Engine>& engine);

}  // namespace hororing
