// Of Python, only the macro of extension modules in vLLM's headers needs this header, and no file with kernels uses that.
#pragma once
