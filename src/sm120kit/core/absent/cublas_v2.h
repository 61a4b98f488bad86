// See cublasLt.h.
#pragma once
#include "cublasLt.h"
