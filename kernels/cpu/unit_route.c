/* SPDX-License-Identifier: Apache-2.0
 *
 * unit_route.c: the unit of routing and of maps of raw ids. Each family is ref's, and then what is faster here.
 */
#include "unit.h"

#include "../collision.h"
#include "../route.h"

#include "../ref/route.c"
#include "route.c"
#include "../ref/collision.c"
#include "collision.c"

K_UNIT(route, K_CPU_ROUTE K_CPU_COLLISION);
