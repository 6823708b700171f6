//! Checks that the delay of a command is reported for the correct stage.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use riser_scsi::opcode::Kind;
use riser_target::backend::{Fault, FaultOn, Faults};
use riser_target::config::Config;
use riser_target::server::Server;
use riser_target::stats::{LunStats, Record, Stage, Tracer};
use riser_test_peers::open_target;
use riser_test_peers::tcp::Client;
use riser_testkit::eventually_some;

const IQN: &str = "iqn.2026-01.org.example:t";

/// Longer than any other delay on a busy machine.
const DELAY: Duration = Duration::from_secs(1);

/// Less than the delay of the disk. The start and end of a stage are based on the clock of the
/// worker's iteration, which is read before the delay of the disk is over, so it may be slightly
/// shorter than [`DELAY`].
const LONG: Duration = Duration::from_millis(900);

struct Bench {
    server: Server,
    faults: Arc<Faults>,
    tracer: Arc<Tracer>,
    client: Client,
}

impl Bench {
    /// Creates a RAM disk, and an initiator whose commands are traced.
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to: SocketAddr = listener.local_addr().unwrap();
        drop(listener);
        let (portals, disk) = ([("iscsi", to.to_string())], "r: { kind: ram, size: 64MiB }");
        let text = open_target(IQN, &portals, disk, "0: r", "workers: { count: 1 }\n");
        let faults = Arc::new(Faults::default());
        let mut config = Config::parse(&text, "test.yaml").unwrap();
        config.backends[0].spec.faults = Some(Arc::clone(&faults));
        let server = Server::start(&config).unwrap();
        let client = Client::ready_at(to, IQN, 1);
        let tracer = Arc::new(Tracer::new(None, Duration::ZERO, 1));
        let bench = Self {
            server,
            faults,
            tracer,
            client,
        };
        bench.stats().trace(Some(Arc::clone(&bench.tracer)));
        bench
    }

    fn stats(&self) -> Arc<LunStats> {
        let catalog = self.server.shared().registry.catalog();
        Arc::clone(&catalog.targets[0].stats[0])
    }

    /// Reads blocks. Waits for `rest` before it receives the data. Returns the trace of the
    /// command, and the total time of reads in each stage.
    fn read(&mut self, blocks: u16, rest: Duration) -> (Record, [Duration; Stage::ALL.len()]) {
        let [high, low] = blocks.to_be_bytes();
        let len = u32::from(blocks) * 512;
        let cdb = [0x28, 0, 0, 0, 0, 0, 0, high, low, 0];
        self.client.send_command(&cdb, false, len, &[]);
        std::thread::sleep(rest);
        let (status, data) = self.client.receive_response();
        assert_eq!((status, data.len()), (0, len as usize));
        // The response may be received before the worker knows that it was sent.
        let record = eventually_some("a record", Duration::from_secs(60), || {
            self.tracer.take_records().pop()
        });
        let counts = self.stats().class(Kind::Read);
        let stages = counts.stages.map(|times| Duration::from_nanos(times.nanos));
        (record, stages)
    }
}

/// Calculates the time spent in each stage from the trace of a command.
fn spent(record: &Record) -> [Duration; Stage::ALL.len()] {
    let mut spent = [Duration::ZERO; Stage::ALL.len()];
    let begins = record.steps.iter();
    let ends = record.steps.iter().skip(1).map(|(_, at)| *at);
    for ((stage, begin), end) in begins.zip(ends.chain([record.took])) {
        spent[*stage as usize] += end - *begin;
    }
    spent
}

fn check(spent: &[Duration], slow: Stage, least: Duration) {
    for stage in Stage::ALL {
        let took = spent[stage as usize];
        if stage == slow {
            assert!(took >= least, "{stage:?}: {spent:?}");
        } else {
            assert!(took < least, "{stage:?}: {spent:?}");
        }
    }
}

#[test]
fn stages_distinguish_slow_disk_and_initiator() {
    let mut bench = Bench::new();
    bench.faults.set(vec![Fault {
        on: FaultOn::Read,
        offset: 0,
        len: 512,
        times: Some(1),
        delay: DELAY,
        error: None,
    }]);
    let (record, stages) = bench.read(1, Duration::ZERO);
    check(&spent(&record), Stage::Backend, LONG);
    check(&stages, Stage::Backend, LONG);
    drop(bench.client);
    bench.server.shutdown().unwrap();

    let mut bench = Bench::new();
    // More than the size of the socket buffers.
    let (record, stages) = bench.read(24 << 11, 2 * DELAY);
    assert!(record.took >= DELAY, "{record:?}");
    check(&stages, Stage::FabricOut, DELAY);
    drop(bench.client);
    bench.server.shutdown().unwrap();
}
