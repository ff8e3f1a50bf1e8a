// Torch's ProcessGroupGloo.hpp includes gloo's headers, which torch does not ship, but it holds gloo's types by pointer
// only: the declarations here and beside are all that it needs. None of gloo's classes is made or derived from by us.
#pragma once
