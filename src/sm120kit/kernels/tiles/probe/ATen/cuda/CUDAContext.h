#pragma once
#include "sm120kit_torch.hpp"
