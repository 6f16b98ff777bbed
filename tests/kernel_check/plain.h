#pragma once
#include <algorithm>

#include "vectors.h"

std::vector<uint8_t> plain(const Case& c);  // y [m, n] of the case's dtype
