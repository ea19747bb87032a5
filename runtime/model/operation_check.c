/* SPDX-License-Identifier: Apache-2.0
 *
 * operation_check.c: whether an operation of a header makes sense: see header_check.c.
 */
#include "../../kernels/codes.h"
#include "../../kernels/dense.h"
#include "../base/buffer.h"
#include "header_check.h"

#include <perilune/collision.h>
#include <perilune/retrieval.h>

enum { MOST_DIMS = PERI_MAX_DIMS - 1 }; /* of one sample: kernels have one more for samples */

static const peri__model_value *input_of(const checker *c, const peri__model_operation *o, int32_t i)
{
    return &c->m->values[o->in[i]];
}
static int64_t columns_of(const checker *c, const peri__model_operation *o, int32_t i)
{
    return input_of(c, o, i)->columns;
}
static bool is_constant(const checker *c, const peri__model_operation *o, int32_t i)
{
    return c->alone || input_of(c, o, i)->section >= 0;
}

/** The code of the operation's function in a list of names. */
static bool function_in(peri__model_operation *o, const char *const *names, int32_t n)
{
    for (o->code = 0; o->code < n; o->code++)
        if (!strcmp(o->function, names[o->code])) return true;
    return false;
}

/** A view of @columns numbers: whether shape and strides stay inside. */
static bool view_stays_inside(const int64_t *shape, const int64_t *stride, int32_t ndim, int64_t offset,
                              int64_t columns)
{
    if (offset < 0 || offset >= columns) return false;
    for (int32_t d = 0; d < ndim; d++) {
        if (stride[d] < 0 || stride[d] > PERI__COLUMNS_MOST) return false;
        offset += (shape[d] - 1) * stride[d];
        if (offset >= columns) return false;
    }
    return true;
}

/** A bag whose input's ids a map makes rows of: note that in the model. */
static peri_status check_mapped(const checker *c, const peri__model_bag *bag)
{
    peri_model *m = c->m;
    peri_model_input *input = &m->inputs[bag->input];
    if (bag->map < 0) return PERI_OK;
    const peri__model_map *map = &m->maps[bag->map];
    WANT(map->rows == m->tables[bag->table].rows, "a bag's map has other rows than its table");
    const bool refuses = map->miss == PERI_MISS_ERROR || (input->mapped && input->unknown == PERI_MODEL_ID_REFUSE);
    input->mapped = true;
    input->unknown = refuses ? PERI_MODEL_ID_REFUSE : PERI_MODEL_ID_SKIP;
    for (int32_t i = 0; i < m->n_mapped; i++)
        if (m->mapped[i].input == bag->input && m->mapped[i].map == bag->map) return PERI_OK;
    PERI_TRY(peri__grow_one((void **)&m->mapped, m->n_mapped, sizeof *m->mapped));
    m->mapped[m->n_mapped++] = (peri__model_mapped){bag->input, bag->map};
    return PERI_OK;
}

/** The weights of places: those of the bag's input, whose lists can be no longer. */
static peri_status check_positions(const checker *c, const peri__model_bag *bag)
{
    peri_model *m = c->m;
    WANT(bag->positions >= -1 && bag->positions < m->n_values, "a bag's weights of places do not exist");
    if (bag->positions < 0) return PERI_OK;
    WANT(m->values[bag->positions].section >= 0, "a bag's weights of places are no constant");
    WANT(!m->inputs[bag->input].weighted, "a bag has weights of places, and its input has weights");
    int64_t *longest = &m->longest[bag->input];
    *longest = peri__min(*longest ? *longest : INT64_MAX, m->values[bag->positions].columns);
    return PERI_OK;
}

static peri_status check_bag(const checker *c, const peri__model_bag *bag)
{
    peri_model *m = c->m;
    WANT(bag->input >= 0 && bag->input < m->n_inputs && m->inputs[bag->input].kind == PERI_MODEL_IDS,
         "a bag's input is not of ids");
    WANT(bag->table >= 0 && bag->table < m->n_tables, "a bag's table does not exist");
    WANT(bag->map >= -1 && bag->map < m->n_maps, "a bag's map does not exist");
    WANT(m->inputs[bag->input].rows <= m->tables[bag->table].rows, "a bag's input allows more rows than its table has");
    PERI_TRY(check_positions(c, bag));
    m->makes = m->makes || bag->map >= 0 || bag->positions >= 0;
    return check_mapped(c, bag);
}

static peri_status check_lookup(const checker *c, const peri__model_operation *o, int64_t out)
{
    int64_t columns = 0;
    WANT(o->n_bags > 0, "it has no bags");
    for (int32_t b = 0; b < o->n_bags; b++) {
        PERI_TRY(check_bag(c, &o->bags[b]));
        columns += c->m->tables[o->bags[b].table].columns;
        WANT(columns <= out, "its rows are wider than its result");
    }
    WANT(columns == out, "its rows are not as wide as its result");
    return PERI_OK;
}

/** rows, lengths: of one bag. */
static peri_status check_one(const checker *c, const peri__model_operation *o, int64_t out)
{
    WANT(o->n_bags == 1, "it wants one bag");
    PERI_TRY(check_bag(c, o->bags));
    if (o->kind == PERI__MODEL_lengths) {
        WANT(out == 1, "its result is no single number");
        return PERI_OK;
    }
    WANT(o->n_sizes == 2 && product_of(o->sizes, 2) == out,
         "it wants the sizes length and columns, which make its result");
    WANT(o->sizes[1] == c->m->tables[o->bags[0].table].columns, "its columns are not those of its table");
    return PERI_OK;
}

static peri_status check_linear(const checker *c, peri__model_operation *o, int64_t out)
{
    static const char *const names[] = {"identity", "relu", "sigmoid", "tanh"};
    WANT(function_in(o, names, 4), "its function is unknown, allowed: identity, relu, sigmoid, tanh");
    WANT(o->n_sizes == 2 && product_of(o->sizes, 2) > 0, "it wants the sizes inner and columns");
    const int64_t inner = o->sizes[0], cols = o->sizes[1], x = columns_of(c, o, 0);
    WANT(x % inner == 0 && out % cols == 0 && x / inner == out / cols, "its sizes are not those of its values");
    WANT(o->weight >= 0 && o->weight < c->m->n_sections, "its weight does not exist");
    WANT(o->weight_dtype >= 0, "its weight is of an unknown dtype, allowed: f32, bf16, int8");
    WANT(c->m->sections[o->weight].bytes == peri_panel_bytes(cols, inner, o->weight_dtype),
         "its weight is not as long as its sizes say");
    WANT(o->products >= 0, "its products are of an unknown dtype, allowed: f32, bf16, int8");
    WANT(o->products == PERI_F32 || o->products == o->weight_dtype,
         "its products are of another dtype than its weight, allowed: that dtype, or f32");
    WANT(o->products != PERI_I8 || inner <= PERI_CODES_MOST,
         "its products are of int8, and its weight has more than 65,536 rows");
    if (o->n_in > 1)
        WANT(is_constant(c, o, 1) && columns_of(c, o, 1) == cols, "its bias is no constant of its columns");
    return PERI_OK;
}

static peri_status check_unary(const checker *c, peri__model_operation *o, int64_t out)
{
    static const char *const names[PERI_UNARY_COUNT] = PERI_UNARY_NAMES;
    WANT(function_in(o, names, PERI_UNARY_COUNT), "its function is unknown");
    WANT(columns_of(c, o, 0) == out, "its values have different columns");
    return PERI_OK;
}

static peri_status check_binary(const checker *c, peri__model_operation *o, int64_t out)
{
    static const char *const names[] = {"add",     "sub", "mul",          "div",       "maximum",
                                        "minimum", "pow", "floor_divide", "remainder", "fmod"};
    static const int32_t codes[] = {PERI_BINARY_ADD,   PERI_BINARY_SUB, PERI_BINARY_MUL,
                                    PERI_BINARY_DIV,   PERI_BINARY_MAX, PERI_BINARY_MIN,
                                    PERI_BINARY_POW,   PERI_BINARY_FLOOR, PERI_BINARY_REMAINDER,
                                    PERI_BINARY_FMOD};
    WANT(function_in(o, names, 10), "its function is unknown, allowed: add, sub, mul, div, maximum, minimum, pow, "
                                    "floor_divide, remainder, fmod");
    o->code = codes[o->code];
    WANT(o->n_sizes >= 1 && o->sizes[0] >= 1 && o->sizes[0] <= MOST_DIMS && o->n_sizes == 1 + 3 * o->sizes[0],
         "it wants the sizes dimensions, shape, and the strides of both");
    const int32_t ndim = (int32_t)o->sizes[0];
    const int64_t *shape = o->sizes + 1, *x = shape + ndim, *y = x + ndim;
    WANT(product_of(shape, ndim) == out, "its shape is not that of its result");
    WANT(view_stays_inside(shape, x, ndim, 0, columns_of(c, o, 0)) &&
         view_stays_inside(shape, y, ndim, 0, columns_of(c, o, 1)),
         "its strides lead out of its values");
    return PERI_OK;
}

/** compare, where: element by element, of as many values as there are; strides of each. */
static peri_status check_elements(const checker *c, peri__model_operation *o, int64_t out)
{
    static const char *const names[] = {"eq", "ne", "lt", "le", "gt", "ge"};
    if (o->kind == PERI__MODEL_compare)
        WANT(function_in(o, names, 6), "its function is unknown, allowed: eq, ne, lt, le, gt, ge");
    WANT(o->n_sizes >= 1 && o->sizes[0] >= 1 && o->sizes[0] <= MOST_DIMS &&
             o->n_sizes == 1 + (1 + o->n_in) * o->sizes[0],
         "it wants the sizes dimensions, shape, and the strides of each value");
    const int32_t ndim = (int32_t)o->sizes[0];
    WANT(product_of(o->sizes + 1, ndim) == out, "its shape is not that of its result");
    for (int32_t i = 0; i < o->n_in; i++)
        WANT(view_stays_inside(o->sizes + 1, o->sizes + 1 + (i + 1) * ndim, ndim, 0, columns_of(c, o, i)),
             "its strides lead out of its values");
    return PERI_OK;
}

static peri_status check_copy(const checker *c, const peri__model_operation *o, int64_t out)
{
    WANT(o->n_sizes >= 2 && o->sizes[0] >= 1 && o->sizes[0] <= MOST_DIMS && o->n_sizes == 2 + 2 * o->sizes[0],
         "it wants the sizes dimensions, offset, shape, strides");
    const int32_t ndim = (int32_t)o->sizes[0];
    WANT(product_of(o->sizes + 2, ndim) == out, "its shape is not that of its result");
    WANT(view_stays_inside(o->sizes + 2, o->sizes + 2 + ndim, ndim, o->sizes[1], columns_of(c, o, 0)),
         "its strides lead out of its value");
    return PERI_OK;
}

static peri_status check_cat(const checker *c, const peri__model_operation *o, int64_t out)
{
    int64_t n = 0;
    WANT(o->n_sizes == 2 + o->n_in && product_of(o->sizes, 2) > 0,
         "it wants the sizes outer, inner, and one for each value");
    for (int32_t i = 0; i < o->n_in; i++) {
        const int64_t shape[] = {o->sizes[0], o->sizes[2 + i], o->sizes[1]};
        WANT(product_of(shape, 3) == columns_of(c, o, i), "its sizes are not those of its values");
        n += o->sizes[2 + i];
        WANT(n <= PERI__COLUMNS_MOST, "its result is too wide");
    }
    const int64_t shape[] = {o->sizes[0], n, o->sizes[1]};
    WANT(product_of(shape, 3) == out, "its sizes are not those of its result");
    return PERI_OK;
}

static peri_status check_around(const checker *c, peri__model_operation *o, int64_t out)
{
    static const char *const names[] = {"softmax", "log_softmax"};
    const bool sum = o->kind == PERI__MODEL_sum;
    WANT(o->n_sizes == (sum ? 4 : 3) && product_of(o->sizes, 3) == columns_of(c, o, 0),
         "its sizes are not those of its value");
    if (sum) {
        WANT(o->sizes[3] >= 1, "its blocks are empty");
        const int64_t shape[] = {o->sizes[0], peri__ceil_div(o->sizes[1], peri__min(o->sizes[3], o->sizes[1])),
                                 o->sizes[2]};
        WANT(product_of(shape, 3) == out, "its sizes are not those of its result");
    } else {
        WANT(function_in(o, names, 2), "its function is unknown, allowed: softmax, log_softmax");
        WANT(columns_of(c, o, 0) == out, "its values have different columns");
    }
    return PERI_OK;
}

static peri_status check_interaction(const checker *c, const peri__model_operation *o, int64_t out)
{
    WANT(o->n_sizes == 2 && product_of(o->sizes, 2) > 0 && o->sizes[0] <= 1 << 13,
         "it wants the sizes features (up to 8,192) and columns");
    const int64_t features = o->sizes[0], dim = o->sizes[1];
    WANT(columns_of(c, o, 0) == dim && columns_of(c, o, 1) == features * dim, "its sizes are not those of its values");
    WANT(out == dim + features * (features + 1) / 2, "its sizes are not those of its result");
    return PERI_OK;
}

static peri_status check_layer_norm(const checker *c, const peri__model_operation *o, int64_t out)
{
    WANT(o->n_sizes == 2 && product_of(o->sizes, 2) == out && columns_of(c, o, 0) == out,
         "its sizes are not those of its values");
    for (int32_t i = 1; i < o->n_in; i++)
        WANT(is_constant(c, o, i) && columns_of(c, o, i) == o->sizes[1],
             "weight and bias are no constants of its columns");
    return PERI_OK;
}

static peri_status check_cross(const checker *c, const peri__model_operation *o, int64_t out)
{
    WANT(o->n_sizes == 1 && o->sizes[0] >= 1 && out % o->sizes[0] == 0, "its columns are not those of its values");
    for (int32_t i = 0; i < 3; i++) WANT(columns_of(c, o, i) == out, "its values have different columns");
    if (o->n_in > 3)
        WANT(is_constant(c, o, 3) && columns_of(c, o, 3) == o->sizes[0], "its bias is no constant of its columns");
    return PERI_OK;
}

static peri_status check_matmul(const checker *c, const peri__model_operation *o, int64_t out)
{
    WANT(o->n_sizes == 10 && product_of(o->sizes, 3) == out && o->sizes[3] >= 1 && o->sizes[3] <= PERI__COLUMNS_MOST,
         "it wants the sizes batch, rows, columns, inner, and strides");
    const int64_t *s = o->sizes, x[] = {s[0], s[1], s[3]}, y[] = {s[0], s[3], s[2]};
    const int64_t factors[] = {s[3], s[1]}, panels[] = {s[3], s[2] + PERI_PANEL};
    WANT(product_of(factors, 2) > 0 && product_of(panels, 2) > 0, "its sizes are too large");
    WANT(view_stays_inside(x, s + 4, 3, 0, columns_of(c, o, 0)) &&
         view_stays_inside(y, s + 7, 3, 0, columns_of(c, o, 1)),
         "its strides lead out of its values");
    return PERI_OK;
}

static peri_status check_cosine(const checker *c, const peri__model_operation *o, int64_t out)
{
    const int64_t shape[] = {out, o->n_sizes == 1 ? o->sizes[0] : 0};
    WANT(o->n_sizes == 1 && product_of(shape, 2) == columns_of(c, o, 0) && columns_of(c, o, 1) == columns_of(c, o, 0),
         "its sizes are not those of its values");
    return PERI_OK;
}

static peri_status check_order(const checker *c, peri__model_operation *o, int64_t out)
{
    static const char *const names[] = {"rising", "falling", "rising_or_nan", "mode"};
    WANT(function_in(o, names, 4), "its function is unknown, allowed: rising, falling, rising_or_nan, mode");
    WANT(o->n_sizes == 3 && o->sizes[0] >= 1 && o->sizes[0] <= PERI__MODEL_WHOLE &&
             columns_of(c, o, 0) % o->sizes[0] == 0,
         "it wants the sizes n (up to 16,777,216), first and k, and n is not that of its value");
    WANT(o->sizes[1] >= 0 && o->sizes[2] >= 1 && o->sizes[2] <= o->sizes[0] && o->sizes[1] <= o->sizes[0] - o->sizes[2],
         "it finds elements that its lines do not have, or none");
    WANT(strcmp(o->function, "mode") != 0 || (o->sizes[1] == 0 && o->sizes[2] == 1),
         "its first is not 0, or its k not 1");
    WANT(out == columns_of(c, o, 0) / o->sizes[0] * o->sizes[2] * 2, "its sizes are not those of its result");
    return PERI_OK;
}

static peri_status check_running(const checker *c, peri__model_operation *o, int64_t out)
{
    static const char *const names[] = {"sum", "product"};
    WANT(function_in(o, names, 2), "its function is unknown, allowed: sum, product");
    WANT(o->n_sizes == 3 && product_of(o->sizes, 3) == out && columns_of(c, o, 0) == out,
         "its sizes are not those of its values");
    return PERI_OK;
}

static peri_status check_extreme(const checker *c, peri__model_operation *o, int64_t out)
{
    static const char *const names[] = {"largest", "smallest"};
    WANT(function_in(o, names, 2), "its function is unknown, allowed: largest, smallest");
    WANT(o->n_sizes == 3 && product_of(o->sizes, 3) == columns_of(c, o, 0) && o->sizes[1] <= PERI__MODEL_WHOLE,
         "its sizes are not those of its value, or it has more than 16,777,216 places");
    WANT(out % 2 == 0 && columns_of(c, o, 0) == out / 2, "its sizes are not those of its result");
    return PERI_OK;
}

static peri_status check_search(const checker *c, peri__model_operation *o, int64_t out)
{
    static const char *const names[] = {"left", "right"};
    WANT(function_in(o, names, 2), "its function is unknown, allowed: left, right");
    WANT(is_constant(c, o, 1) && columns_of(c, o, 1) <= PERI__MODEL_WHOLE, "what it looks through is no constant");
    WANT(columns_of(c, o, 0) == out, "its values have different columns");
    return PERI_OK;
}

/** Elements of x by the places of others along a dimension of n elements, @stride apart. */
static peri_status check_pick(const checker *c, const peri__model_operation *o, int64_t out)
{
    const int64_t *s = o->sizes, columns = columns_of(c, o, 0);
    WANT(o->n_sizes >= 3 && s[2] >= 1 && s[2] <= MOST_DIMS && o->n_sizes == 3 + 2 * s[2],
         "it wants the sizes n, stride, dimensions, shape, strides");
    const int32_t ndim = (int32_t)s[2];
    WANT(product_of(s + 3, ndim) == out && columns_of(c, o, 1) == out, "its shape is not that of its result");
    WANT(s[0] >= 1 && s[1] >= 1 && product_of(s, 2) > 0 && (s[0] - 1) * s[1] < columns &&
             view_stays_inside(s + 3, s + 3 + ndim, ndim, (s[0] - 1) * s[1], columns),
         "its strides lead out of its value");
    return PERI_OK;
}

/** As pick, the other way: places and the numbers for them have one shape, and the result is as x. */
static peri_status check_put(const checker *c, peri__model_operation *o, int64_t out)
{
    static const char *const names[] = {"last", "sum"};
    const int64_t *s = o->sizes;
    WANT(function_in(o, names, 2), "its function is unknown, allowed: last, sum");
    WANT(columns_of(c, o, 0) == out, "its result has other columns than its value");
    WANT(o->n_sizes >= 3 && s[2] >= 1 && s[2] <= MOST_DIMS && o->n_sizes == 3 + 2 * s[2],
         "it wants the sizes n, stride, dimensions, shape, strides");
    const int32_t ndim = (int32_t)s[2];
    const int64_t all = product_of(s + 3, ndim);
    WANT(all > 0 && all == columns_of(c, o, 1) && all == columns_of(c, o, 2),
         "its shape is not that of its places and of what it puts there");
    WANT(s[0] >= 1 && s[0] <= PERI__MODEL_WHOLE && s[1] >= 1 && product_of(s, 2) > 0 && (s[0] - 1) * s[1] < out &&
             view_stays_inside(s + 3, s + 3 + ndim, ndim, (s[0] - 1) * s[1], out),
         "its strides lead out of its value");
    return PERI_OK;
}

static peri_status check_top(const checker *c, const peri__model_operation *o, int64_t out)
{
    const peri_model *m = c->m;
    WANT(o->table >= 0 && o->table < m->n_tables, "its table does not exist");
    const peri_model_table *t = &m->tables[o->table];
    WANT(t->columns == columns_of(c, o, 0), "its table has other columns than its value");
    WANT(t->rows <= PERI__MODEL_WHOLE, "its table has more than 16,777,216 rows, whose numbers f32 does not hold");
    WANT(o->n_sizes == 1 && o->sizes[0] >= 1 && o->sizes[0] <= peri__min(t->rows, PERI_TOP_MOST),
         "it finds too many rows, or none");
    WANT(out == 2 * o->sizes[0], "its result is not twice as long as the rows that it finds are many");
    return PERI_OK;
}

/* -- members of lists ---------------------------------------------------------------------------------------------- */

/** The list of the operation's result; NULL: it is of samples, or of a list whose members are not known yet. */
static peri__model_list *result_list(const checker *c, const peri__model_operation *o)
{
    const int32_t l = c->m->values[o->out].list;
    if (l < 0 || (c->m->lists[l].n_inputs == 0 && c->m->lists[l].made_by < 0)) return NULL;
    return &c->m->lists[l];
}

/** Whether input @i of the operation has numbers of samples, not of members. */
static bool of_samples(const checker *c, const peri__model_operation *o, int32_t i)
{
    return input_of(c, o, i)->list < 0;
}

static peri_status check_members(const checker *c, const peri__model_operation *o, int64_t out)
{
    WANT(o->n_bags == 1, "it wants one bag");
    PERI_TRY(check_bag(c, o->bags));
    WANT(has_input(result_list(c, o), o->bags->input), "its result is not of a list of its bag's input");
    WANT(c->m->tables[o->bags->table].columns == out, "its result is not as wide as its table");
    WANT(o->bags->positions < 0, "it has weights of places");
    return PERI_OK;
}

static peri_status check_spread(const checker *c, const peri__model_operation *o, int64_t out)
{
    WANT(of_samples(c, o, 0) && result_list(c, o), "it wants numbers of samples, and gives those of members");
    WANT(columns_of(c, o, 0) == out, "its values have different columns");
    return PERI_OK;
}

static peri_status check_pool(const checker *c, peri__model_operation *o, int64_t out)
{
    static const char *const names[] = {"sum", "mean"};
    WANT(function_in(o, names, 2), "its function is unknown, allowed: sum, mean");
    WANT(!of_samples(c, o, 0) && c->m->values[o->out].list < 0,
         "it wants numbers of members, and gives those of samples");
    WANT(columns_of(c, o, 0) == out, "its values have different columns");
    return PERI_OK;
}

/** No list of the inputs of @l is longer than @most. */
static peri_status limit_lists(const checker *c, const peri__model_list *l, int64_t most)
{
    WANT(most >= 0 && most <= PERI__COLUMNS_MOST, "the length of the longest list is not allowed");
    WANT(most == 0 || l->n_inputs > 0, "it has a longest list, but its list is of another one");
    for (int32_t i = 0; i < l->n_inputs && most > 0; i++) {
        int64_t *longest = &c->m->longest[l->inputs[i]];
        *longest = peri__min(*longest ? *longest : INT64_MAX, most);
    }
    return PERI_OK;
}

static peri_status check_targets(const checker *c, const peri__model_operation *o, int32_t i)
{
    if (o->n_in > i)
        WANT(of_samples(c, o, i) && columns_of(c, o, i) == 1, "its numbers of targets are not one for each sample");
    return PERI_OK;
}

static peri_status check_attention(const checker *c, peri__model_operation *o, int64_t out)
{
    static const char *const names[] = {"softmax", "hstu"};
    const peri__model_list *l = result_list(c, o);
    WANT(function_in(o, names, 2), "its function is unknown, allowed: softmax, hstu");
    WANT((o->n_sizes == 6 || (o->n_sizes == 7 && o->sizes[6] >= 0) ||
          (o->n_sizes == 8 && o->sizes[6] >= 0 && o->sizes[7] >= 0)) && product_of(o->sizes, 2) > 0 &&
             o->sizes[2] >= 1 && o->sizes[2] <= PERI__COLUMNS_MOST && o->sizes[3] >= 0,
         "it wants the sizes heads, dim, columns of values, window, causal, longest, and perhaps contextual and full");
    const int64_t v[] = {o->sizes[0], o->sizes[2]};
    WANT(l, "its result is not of members");
    for (int32_t i = 0; i < 3; i++) {
        WANT(input_of(c, o, i)->list == c->m->values[o->out].list, "its values are not of one list");
        WANT(columns_of(c, o, i) == product_of(i == 2 ? v : o->sizes, 2), "its sizes are not those of its values");
    }
    WANT(product_of(v, 2) == out, "its sizes are not those of its result");
    PERI_TRY(limit_lists(c, l, o->sizes[5]));
    return check_targets(c, o, 3);
}

static peri_status check_places(const checker *c, const peri__model_operation *o, int64_t out)
{
    WANT(result_list(c, o) && out == 1, "its result is not one number for each member");
    WANT(o->n_sizes == 1 && o->sizes[0] >= 1, "it wants the largest place");
    return check_targets(c, o, 0);
}

static peri_status check_times(const checker *c, peri__model_operation *o, int64_t out)
{
    static const char *const names[] = {"sqrt", "log"};
    WANT(function_in(o, names, 2), "its function is unknown, allowed: sqrt, log");
    WANT(o->input >= 0 && o->input < c->m->n_inputs && c->m->inputs[o->input].kind == PERI_MODEL_WHOLE,
         "its input is not of whole numbers");
    WANT(has_input(result_list(c, o), o->input) && out == 1,
         "its result is not one number for each member of its input");
    WANT(o->n_sizes == 1 && o->sizes[0] >= 1 && o->numbers[0] > 0 && o->numbers[0] <= 0x1p1000,
         "its sizes or numbers are not allowed");
    return PERI_OK;
}

/** Rows of a constant, of numbers of samples or of members. */
static peri_status check_take(const checker *c, const peri__model_operation *o, int64_t out)
{
    const int64_t columns = columns_of(c, o, 0), shape[] = {columns, o->n_sizes == 2 ? o->sizes[1] : 0};
    WANT(is_constant(c, o, 1), "its rows are no constant");
    WANT(o->n_sizes == 2 && product_of(o->sizes, 2) == columns_of(c, o, 1), "its sizes are not those of its rows");
    WANT(product_of(shape, 2) == out, "its sizes are not those of its result");
    WANT(input_of(c, o, 0)->list == c->m->values[o->out].list, "its values are not of one list");
    return PERI_OK;
}

/** Some members of the list of what it reads: from here on the list of the result is known. Several operations may keep
 *  the same members of several values. */
static peri_status check_kept(const checker *c, const peri__model_operation *o)
{
    peri_model *m = c->m;
    const int32_t from = input_of(c, o, 0)->list, to = m->values[o->out].list;
    WANT(to >= 0 && m->lists[to].n_inputs == 0, "its result is of no list of another");
    WANT(from >= 0 && m->lists[to].of == from, "its values are not of the list that it selects from");
    peri__model_list *list = &m->lists[to];
    if (list->made_by >= 0) {
        const peri__model_operation *first = &m->operations[list->made_by];
        WANT(first->kind == o->kind && first->code == o->code && first->n_in == o->n_in &&
                 (o->n_in < 2 || first->in[1] == o->in[1]) && (o->n_sizes == 0 || first->sizes[0] == o->sizes[0]),
             "other members of its result's list have been kept before");
        return PERI_OK;
    }
    list->made_by = (int32_t)c->n;
    return PERI_OK;
}

/** The members of a list whose mask is not 0. */
static peri_status check_select(const checker *c, const peri__model_operation *o, int64_t out)
{
    WANT(input_of(c, o, 1)->list == input_of(c, o, 0)->list, "its values are not of the list that it selects from");
    WANT(o->n_sizes == 0, "it has sizes");
    WANT(columns_of(c, o, 0) == out && columns_of(c, o, 1) == 1,
         "its values have different columns, or its mask several");
    return check_kept(c, o);
}

/** The first members of a list (from a place on, which is the sample's or a constant), or the last ones. */
static peri_status check_slice(const checker *c, peri__model_operation *o, int64_t out)
{
    static const char *const names[] = {"first", "last"};
    WANT(function_in(o, names, 2), "its function is unknown, allowed: first, last");
    WANT(o->n_sizes == 1 && o->sizes[0] >= 0, "it wants how many members it keeps at most");
    WANT(columns_of(c, o, 0) == out, "its values have different columns");
    if (o->n_in > 1) {
        WANT(o->code == 0, "it keeps the last members, and has a place to begin at");
        WANT(of_samples(c, o, 1) && columns_of(c, o, 1) == 1, "where it begins is not one number for each sample");
    }
    return check_kept(c, o);
}

/** Operations that go from samples to members or back look at their lists themselves; of all others values and result
 *  are of one. */
static peri_status check_lists(const checker *c, const peri__model_operation *o)
{
    const int32_t list = c->m->values[o->out].list;
    switch (o->kind) {
    case PERI__MODEL_members:
    case PERI__MODEL_spread:
    case PERI__MODEL_pool:
    case PERI__MODEL_attention:
    case PERI__MODEL_places:
    case PERI__MODEL_times:
    case PERI__MODEL_take:
    case PERI__MODEL_select:
    case PERI__MODEL_slice: return PERI_OK;
    default: break;
    }
    WANT(list < 0 || o->n_in > 0, "its result is of a list, of which it reads nothing");
    for (int32_t i = 0; i < o->n_in; i++)
        WANT(is_constant(c, o, i) || input_of(c, o, i)->list == list, "its values are not of one list");
    return PERI_OK;
}

static peri_status check_sizes(const checker *c, peri__model_operation *o, int64_t out)
{
    switch (o->kind) {
    case PERI__MODEL_lookup: return check_lookup(c, o, out);
    case PERI__MODEL_linear: return check_linear(c, o, out);
    case PERI__MODEL_unary: return check_unary(c, o, out);
    case PERI__MODEL_binary: return check_binary(c, o, out);
    case PERI__MODEL_muladd:
        for (int32_t i = 0; i < 3; i++) WANT(columns_of(c, o, i) == out, "its values have different columns");
        return PERI_OK;
    case PERI__MODEL_cross: return check_cross(c, o, out);
    case PERI__MODEL_interaction: return check_interaction(c, o, out);
    case PERI__MODEL_compare:
    case PERI__MODEL_where: return check_elements(c, o, out);
    case PERI__MODEL_copy: return check_copy(c, o, out);
    case PERI__MODEL_cat: return check_cat(c, o, out);
    case PERI__MODEL_sum:
    case PERI__MODEL_softmax: return check_around(c, o, out);
    case PERI__MODEL_layer_norm: return check_layer_norm(c, o, out);
    case PERI__MODEL_matmul: return check_matmul(c, o, out);
    case PERI__MODEL_top: return check_top(c, o, out);
    case PERI__MODEL_cosine: return check_cosine(c, o, out);
    case PERI__MODEL_order: return check_order(c, o, out);
    case PERI__MODEL_running: return check_running(c, o, out);
    case PERI__MODEL_search: return check_search(c, o, out);
    case PERI__MODEL_pick: return check_pick(c, o, out);
    case PERI__MODEL_extreme: return check_extreme(c, o, out);
    case PERI__MODEL_put: return check_put(c, o, out);
    case PERI__MODEL_rows:
    case PERI__MODEL_lengths: return check_one(c, o, out);
    case PERI__MODEL_members: return check_members(c, o, out);
    case PERI__MODEL_spread: return check_spread(c, o, out);
    case PERI__MODEL_pool: return check_pool(c, o, out);
    case PERI__MODEL_attention: return check_attention(c, o, out);
    case PERI__MODEL_places: return check_places(c, o, out);
    case PERI__MODEL_times: return check_times(c, o, out);
    case PERI__MODEL_take: return check_take(c, o, out);
    case PERI__MODEL_select: return check_select(c, o, out);
    case PERI__MODEL_slice: return check_slice(c, o, out);
    default: return bad(c, "it has no kind");
    }
}

/** Values that an operation reads for each sample, and that may not be constants. */
static bool wants_samples(const peri__model_operation *o, int32_t i)
{
    switch (o->kind) {
    case PERI__MODEL_binary:
    case PERI__MODEL_compare:
    case PERI__MODEL_where:
    case PERI__MODEL_copy:
    case PERI__MODEL_cat:
    case PERI__MODEL_pick:
    case PERI__MODEL_put:
    case PERI__MODEL_matmul: return false;
    case PERI__MODEL_linear:
    case PERI__MODEL_search:
    case PERI__MODEL_take:
    case PERI__MODEL_slice:
    case PERI__MODEL_layer_norm: return i == 0;
    case PERI__MODEL_cross: return i < 3;
    default: return true;
    }
}

peri_status peri__check_operation(const checker *c, peri__model_operation *o)
{
    static const struct {
        int32_t least, most;
    } arity[] = {
#define X(name, least, most) {least, most},
        PERI__MODEL_OPERATIONS(X)
#undef X
    };
    peri_model *m = c->m;
    WANT(o->kind >= 0, "it has no kind");
    WANT(o->n_in >= arity[o->kind].least && o->n_in <= arity[o->kind].most, "it reads too few values, or too many");
    for (int32_t i = 0; i < o->n_in; i++) {
        WANT(o->in[i] >= 0 && o->in[i] < m->n_values, "a value that it reads does not exist");
        peri__model_value *v = &m->values[o->in[i]];
        WANT(v->input >= 0 || v->section >= 0 || v->made_by >= 0, "a value that it reads has not been made before");
        WANT(v->section < 0 || c->alone || !wants_samples(o, i), "a value that it reads is a constant");
        v->last = (int32_t)c->n;
    }
    WANT(o->out >= 0 && o->out < m->n_values, "its result does not exist");
    peri__model_value *out = &m->values[o->out];
    WANT(out->input < 0 && out->section < 0 && out->made_by < 0,
         "its result is an input, a constant, or another operation's");
    PERI_TRY(check_lists(c, o));
    PERI_TRY(check_sizes(c, o, out->columns));
    out->made_by = (int32_t)c->n;
    return PERI_OK;
}

peri_status peri__check_raw(const checker *c, const peri__model_operation *o)
{
    for (int32_t b = 0; b < o->n_bags; b++)
        WANT(o->bags[b].map >= 0 || !c->m->inputs[o->bags[b].input].mapped,
             "an input's ids are raw in one bag, and rows in another");
    return PERI_OK;
}
