// Stands before glibc's header of this name: libstdc++ would otherwise reference a symbol of glibc 2.32. Zero says
// "there may be other threads", which is what torch has.
#pragma once
static const char __libc_single_threaded = 0;
