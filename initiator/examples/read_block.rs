//! Attaches a logical unit, reads its first block and prints the beginning.
//!
//! ```sh
//! cargo run -p riser-initiator --example read_block -- iscsi://127.0.0.1/iqn.2026-01.com.example:demo/0
//! ```
//!
//! SRP and iSER need an RDMA device, here our software NIC. It uses the local address in the second
//! argument:
//!
//! ```sh
//! cargo run -p riser-initiator --example read_block -- srp://127.0.0.1/0 127.0.0.2
//! ```

#![allow(clippy::print_stdout, reason = "the result is printed")]

use std::error::Error;

use riser_block::task::block_on;
use riser_block::{BlockDevice, Buffer};
use riser_initiator::engine::Client;
use riser_initiator::url::TargetUrl;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let url: TargetUrl = args
        .next()
        .ok_or("usage: read_block URL [ADDRESS]")?
        .parse()?;
    let client = match args.next() {
        Some(address) => Client::builder().open(address.parse()?)?,
        None => Client::builder().without_device()?,
    };
    let block = block_on(read_block(&client, url))?;
    println!("{:02x?}", &block.slice().to_vec()[..16]);
    client.shutdown();
    Ok(())
}

/// Logs in and reads the first block of the logical unit.
async fn read_block(client: &Client, url: TargetUrl) -> Result<Buffer, Box<dyn Error>> {
    let number = url.lun().unwrap_or(0).into();
    let session = client.connect(url).await?;
    let disk = session.lun(number).await?;
    let len = disk.geometry().block_size as usize;
    let buffer = session.buffer(len).await?;
    let block = disk.read(0, buffer).await?;
    session.close().await;
    Ok(block)
}
