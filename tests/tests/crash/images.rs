//! Disk images after a power failure. The daemon is started with each of them.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use riser_block::task::block_on;
use riser_initiator::engine::Client;
use riser_initiator::url::TargetUrl;
use riser_testkit::eventually_ok;
use riser_testkit::programs::{Pair, change_owner};
use riser_tests::contest::{IQN, portals};
use riser_tests::history::BLOCK;

const PATIENCE: Duration = Duration::from_secs(60);

/// A daemon that can be started with several images in sequence.
pub(crate) struct Images {
    pair: Pair,
    file: PathBuf,
    network: u8,
    count: usize,
}

impl Images {
    /// Creates the daemon using these backend keys and this content of its file.
    pub(crate) fn new(network: u8, content: &[u8], keys: &str) -> Self {
        let name = format!("riser-image-{}-{network}", std::process::id());
        let file = std::env::temp_dir().join(name);
        fs::write(&file, content).unwrap();
        change_owner(&file);
        let backend = format!("{{ kind: file, path: {}, {keys} }}", file.display());
        let mut pair = Pair::with_target(network, &backend, &portals(network));
        pair.kill();
        Self {
            pair,
            file,
            network,
            count: 0,
        }
    }

    /// Starts the daemon with this content of its file and reads the disk, using a different protocol
    /// each time.
    ///
    /// # Panics
    /// Panics if an initiator reads different data.
    pub(crate) fn check(&mut self, file: &[u8], data: &[u8]) {
        fs::write(&self.file, file).unwrap();
        change_owner(&self.file);
        self.pair.serve();
        let scheme = ["srp", "iser", "iscsi"][self.count % 3];
        self.count += 1;
        let client = client(self.network, scheme);
        let session = eventually_ok("a login", PATIENCE, || {
            block_on(client.connect(url(self.network, scheme)))
        });
        let lun = block_on(session.lun(0)).unwrap();
        let buffer = block_on(lun.buffers().take_buffer(data.len()));
        let buffer = block_on(lun.read(0, buffer)).unwrap();
        let found = buffer.slice().to_vec();
        let mut blocks = found.chunks(BLOCK).zip(data.chunks(BLOCK));
        let differs = blocks.position(|(found, expected)| found != expected);
        assert_eq!(differs, None, "a block that differs, over {scheme}");
        drop((lun, buffer));
        block_on(session.close());
        client.shutdown();
        self.pair.kill();
    }
}

impl Drop for Images {
    fn drop(&mut self) {
        self.pair.kill();
        let _ = fs::remove_file(&self.file);
    }
}

pub(crate) fn client(network: u8, scheme: &str) -> Client {
    let builder = Client::builder().pool(2 << 20);
    let client = match scheme {
        "iscsi" => builder.without_device(),
        "srp" => builder.open(format!("127.0.{network}.2").parse().unwrap()),
        _ => builder.open(format!("127.0.{network}.3").parse().unwrap()),
    };
    client.unwrap()
}

/// Returns the URL of the unit in a target created by [`portals`].
pub(crate) fn url(network: u8, scheme: &str) -> TargetUrl {
    let target = match scheme {
        "srp" => "0".to_owned(),
        _ => format!("{IQN}/0"),
    };
    let url = format!("{scheme}://127.0.{network}.1/{target}");
    url.parse().unwrap()
}
