//! Reads of 4 KiB over the wire in memory, one after another, for counting what they cost a worker.
//!
//! ```text
//! cargo bench -p riser-target --bench commands --no-run
//! valgrind --tool=callgrind --collect-atstart=no --toggle-collect='*Worker*step*' PROGRAM 500
//! ```
//!
//! The instructions are the same in every run; the difference between 500 reads and 1500 belongs to the
//! reads alone. The wire in memory is among them.

#[path = "../tests/mini/mod.rs"]
mod mini;
#[path = "../tests/world/mod.rs"]
mod world;

use std::net::SocketAddr;

use mini::{Mini, config, login_req};
use riser_target::config::Config;
use riser_transport::roce::fault::FaultConfig;
use world::{SERVER, World};

fn main() {
    let reads: u32 = std::env::args()
        .find_map(|arg| arg.parse().ok())
        .unwrap_or(1000);
    let text = config(SERVER, 1, "");
    let config = Config::parse(&text, "bench.yaml").unwrap();
    let mut world = World::serving(FaultConfig::default(), &config);
    let target = world.shared.registry.catalog().targets[0].portals[0].target_port();
    let dev = world.client(1);
    let dst = SocketAddr::new(SERVER, 5555);
    let req = login_req(1, target);
    let mut mini = Mini::connect(dev, dst, &req, &mut |d| world.pump(d))
        .map_err(|(_, e)| e)
        .unwrap();
    mini.settle(&mut |d| world.pump(d));
    for n in 0..reads {
        let answer = mini.read(n % 256 * 8, 8, 0, &mut |d| world.pump(d));
        assert_eq!(answer.status, 0);
    }
}
