// The constructors of string streams that torch's stable headers use are newer in libstdc++ than manylinux_2_28 has.
// Instantiated here they are our own, hidden.
#include <sstream>
template class std::basic_stringstream<char>;
template class std::basic_ostringstream<char>;
