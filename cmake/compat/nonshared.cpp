// What gcc 12 and torch's stable headers take from libstdc++ and manylinux_2_28 does not have: the constructors of string
// streams, and what a std::vector calls when asked for too much. Here they are our own, hidden.
#include <new>
#include <sstream>
template class std::basic_stringstream<char>;
template class std::basic_ostringstream<char>;
namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
