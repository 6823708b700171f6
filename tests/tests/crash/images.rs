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

/// Data on a disk.
pub(crate) struct Image(Vec<u8>);

impl Image {
    pub(crate) fn new(blocks: u64) -> Self {
        Self(vec![0; blocks as usize * BLOCK])
    }

    pub(crate) fn block(&mut self, block: u64) -> &mut [u8] {
        let at = block as usize * BLOCK;
        &mut self.0[at..at + BLOCK]
    }
}

/// A daemon that can be started with several images in sequence.
pub(crate) struct Images {
    pair: Pair,
    file: PathBuf,
    network: u8,
    count: usize,
}

impl Images {
    /// Creates the daemon using these backend keys.
    pub(crate) fn new(network: u8, blocks: u64, keys: &str) -> Self {
        let name = format!("riser-image-{}-{network}", std::process::id());
        let file = std::env::temp_dir().join(name);
        fs::write(&file, Image::new(blocks).0).unwrap();
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

    /// Starts the daemon and reads the whole image, using a different protocol each time.
    ///
    /// # Panics
    /// Panics if an initiator reads different data.
    pub(crate) fn check(&mut self, image: &Image) {
        fs::write(&self.file, &image.0).unwrap();
        change_owner(&self.file);
        self.pair.serve();
        let scheme = ["srp", "iser", "iscsi"][self.count % 3];
        self.count += 1;
        let client = client(self.network, scheme);
        let session = eventually_ok("a login", PATIENCE, || {
            block_on(client.connect(url(self.network, scheme)))
        });
        let lun = block_on(session.lun(0)).unwrap();
        let buffer = block_on(lun.buffers().take_buffer(image.0.len()));
        let buffer = block_on(lun.read(0, buffer)).unwrap();
        let found = buffer.slice().to_vec();
        let mut blocks = found.chunks(BLOCK).zip(image.0.chunks(BLOCK));
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
