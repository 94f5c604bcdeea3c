// Products as the kernels make them, of weights and rows that standard input has, to standard output: for each case
// seven int64 (type, out, in, rows, way, bytes of an input, bytes of the weight), the weight, rows of float32; the
// results, float32 [rows, out].
// Ends with 1 where a row is another one if it is multiplied alone.

#include "program.cpp"

#include <cstdio>
#include <vector>

static bool get(void* to, size_t bytes) { return std::fread(to, 1, bytes, stdin) == bytes; }

static std::vector<float> products(const Weight& weight, const float* x, int64_t rows) {
    int64_t inside = (weight.in + 31) / 32 * 32, width = column_groups(weight) * GROUP;
    std::vector<float> ready((rows + 31) / 32 * 32 * inside), y(rows * width), out(rows * weight.out);
    for (int64_t row = 0; row < rows; row++) prepare(weight.type, x + row * weight.in, weight.in, row, rows, ready.data());
    multiply(weight, ready.data(), rows, y.data(), width, 0, column_groups(weight));
    for (int64_t row = 0; row < rows; row++)
        std::memcpy(&out[row * weight.out], &y[row * width], weight.out * sizeof(float));
    return out;
}

int main() {
    int64_t head[7];
    while (get(head, sizeof head)) {
        const auto [type, out, in, rows, way, size, bytes] = head;
        void* data = std::aligned_alloc(64, (bytes + 4096 + 63) / 64 * 64);
        std::vector<float> x(rows * in);
        if (!data || !get(data, bytes) || !get(x.data(), x.size() * sizeof(float))) return 2;
        for (int64_t& one : warmturn_chosen_ways) one = way;
        warmturn_activation_bytes = size;
        Weight weight{data, out, in, type};
        std::vector<float> all = products(weight, x.data(), rows);
        for (int64_t row = 0; row < rows; row++) {
            std::vector<float> alone = products(weight, &x[row * in], 1);
            if (std::memcmp(alone.data(), &all[row * out], out * sizeof(float))) return 1;
        }
        std::fwrite(all.data(), sizeof(float), all.size(), stdout);
        std::free(data);
    }
    return 0;
}
