// Payloads from other workers: everything that a worker does with what it receives, in both exchanges and all
// formats. It is worker 0 of two, or of nine, for which the statistics compare each payload with the mean
// only. The other workers send bytes that libFuzzer makes up.
//
//     | a byte: format + 6 * (exchange + 2 * (weights + 2 * many)) | all received bytes in order |
#include "dev/break/fuzz/fuzz.h"
#include "dev/test/unit/local_comm.h"
#include "streaming/all_gather_exchange.h"
#include "streaming/all_to_all_exchange.h"

const Sync sync_of_all = {3, 0, 17, 3 * quantization_block};
const std::vector<Piece> pieces = {{0, 2 * quantization_block, 1000},
                                   {2 * quantization_block, quantization_block, 50000}};

struct Setup {
    explicit Setup(uint8_t code) : workers(code / 24 % 2 == 0 ? 2 : 9) {
        wire.format = Format(code % 6);
        wire.exchange = code / 6 % 2 == 0 ? ExchangeKind::all_gather : ExchangeKind::all_to_all;
        wire.token_weights = code / 12 % 2 == 1;
        wire.error_feedback = true;
    }

    std::unique_ptr<Exchange> exchange(Comm& comm, Stream& stream) const {
        if (wire.exchange == ExchangeKind::all_gather) {
            return std::make_unique<AllGatherExchange>(wire, sync_of_all.values, 1, comm, stream);
        }
        return std::make_unique<AllToAllExchange>(wire, std::vector<std::vector<Piece>>{pieces}, 1, comm,
                                                  stream);
    }

    WireOptions wire;
    int workers;
};

// The communicator of worker 0. The other workers send the bytes of an input, and zeros after its end.
class HostileComm : public Comm {
public:
    HostileComm(const std::string& input, int workers) : input(input), at(1), workers(workers) {}

    int rank() const override { return 0; }
    int size() const override { return workers; }
    void all_gather(void* out, const void* inp, size_t bytes, Stream&, Traffic*) override {
        receive(static_cast<uint8_t*>(out), static_cast<const uint8_t*>(inp), bytes);
    }
    void all_to_all(void* out, const void* inp, size_t bytes, Stream&, Traffic*) override {
        receive(static_cast<uint8_t*>(out), static_cast<const uint8_t*>(inp), bytes);
    }
    void reduce_scatter(float*, const float*, size_t, Stream&, Traffic*) override { abort(); }
    void all_reduce(float*, size_t, Stream&, Traffic*) override { abort(); }

private:
    void receive(uint8_t* out, const uint8_t* own, size_t bytes) {
        memcpy(out, own, bytes);
        const size_t wanted = bytes * size_t(workers - 1), count = std::min(wanted, input.size() - at);
        memset(out + bytes, 0, wanted);
        memcpy(out + bytes, input.data() + at, count);
        at += count;
    }

    const std::string& input;
    size_t at;
    int workers;
};

void send(Exchange& exchange, int worker, Stream& main) {
    uint8_t* payload = exchange.payload(sync_of_all);
    const PayloadLayout layout = exchange.layout(sync_of_all);
    for (int part = 0; part < layout.parts; part++) {
        device::write_header(payload + size_t(part) * layout.bytes,
                             make_header(sync_of_all, layout, part, worker, 100), main);
    }
    device::clear_padding(payload, layout, main);
    std::vector<float> values;
    for (long i = 0; i < sync_of_all.values; i++) {
        values.push_back(float(i % 31 - 15) * float(worker + 1));
    }
    device::quantize(payload, layout, Rounding(), 0, {values.data()}, sync_of_all.values, main);
    exchange.start(sync_of_all, main);
}

void receive(Exchange& exchange, int workers, Stream& main) {
    const Headers headers = exchange.wait(sync_of_all);
    require(!headers.sent.empty(), "at least one part has headers");
    for (const std::vector<PayloadHeader>& part : headers.sent) {
        require(part.size() == size_t(workers), "every worker has a header");
        for (int worker : diverged_workers(part)) { require(worker < workers, "a diverged worker exists"); }
        for (int w = 0; w < workers; w++) {
            require(part[size_t(w)].worker == uint32_t(w), "headers are in the workers' order");
        }
    }
    const double encoding[encoding_sums] = {1, 1};
    const OuterStatistics statistics = outer_statistics(encoding, headers.sums, workers);
    require(statistics.cosines.size() + statistics.mean_cosines.size() == size_t(workers == 2 ? 1 : workers),
            "there is a cosine for each pair of two, or for each worker with the mean");
    std::vector<float> mean(size_t(sync_of_all.values));
    exchange.mean(mean.data(), sync_of_all, main);
    exchange.finish(sync_of_all, false, main);
}

void fuzz(const std::string& bytes) {
    if (bytes.empty()) { return; }
    const Setup setup{uint8_t(bytes[0])};
    HostileComm comm(bytes, setup.workers);
    Stream main, outer;
    const std::unique_ptr<Exchange> exchange = setup.exchange(comm, outer);
    send(*exchange, 0, main);
    receive(*exchange, setup.workers, main);
}

// The bytes that worker 0 receives from honest workers.
std::string exchange_once(uint8_t code) {
    const Setup setup(code);
    LocalGroup group(setup.workers);
    std::string received(1, char(code));
    auto record = [&](long, uint8_t* parts, size_t bytes) {
        received.append(reinterpret_cast<char*>(parts) + bytes, bytes * size_t(setup.workers - 1));
    };
    const std::vector<std::string> errors = run_members(setup.workers, [&](int worker) {
        LocalComm comm(group, worker, nullptr, worker == 0 ? record : LocalComm::Corrupt());
        Stream main, outer(Stream::Kind::communicate);
        const std::unique_ptr<Exchange> exchange = setup.exchange(comm, outer);
        send(*exchange, worker, main);
        receive(*exchange, setup.workers, main);
    });
    for (const std::string& error : errors) {
        if (!error.empty()) { throw RunError(error); }
    }
    return received;
}

std::vector<std::string> seeds() {
    std::vector<std::string> all;
    for (uint8_t code = 0; code < 48; code++) { all.push_back(exchange_once(code)); }
    return all;
}
