// Volta tensor core fragments: need types that only nvcc has, and no SM120 kernel uses them.
#pragma once
