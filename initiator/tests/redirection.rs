//! An iSCSI portal that redirects a login to a host name.

#![allow(missing_docs, reason = "a test")]

use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use riser_block::task::block_on;
use riser_initiator::engine::Client;
use riser_initiator::url::IscsiUrl;

const NAME: &str = "iqn.2026-01.com.example:disk";

/// Accepts a connection and redirects its login.
fn redirect(listener: &TcpListener, to: &str) {
    let (mut stream, _) = listener.accept().unwrap();
    let mut request = [0; 48];
    stream.read_exact(&mut request).unwrap();
    let text = format!("TargetAddress={to},1\0");
    let mut response = [0; 48];
    (response[0], response[1]) = (0x23, 0x80);
    response[7] = text.len() as u8;
    response[8..14].copy_from_slice(&request[8..14]);
    response[16..20].copy_from_slice(&request[16..20]);
    response[28..32].copy_from_slice(&request[24..28]);
    response[32..36].copy_from_slice(&request[24..28]);
    // TARGET MOVED TEMPORARILY
    (response[36], response[37]) = (1, 1);
    let mut bytes = [&response[..], text.as_bytes()].concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    stream.write_all(&bytes).unwrap();
}

/// RFC 7143 clause 13.8: a TargetAddress may contain a domain name.
#[test]
fn redirection_to_host_name_is_followed() {
    let first = TcpListener::bind("127.0.0.1:0").unwrap();
    let second = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("iscsi://{}/{NAME}/0", first.local_addr().unwrap());
    let url: IscsiUrl = url.parse().unwrap();
    let to = format!("localhost:{}", second.local_addr().unwrap().port());
    let login = thread::spawn(move || {
        let client = Client::builder().pool(1 << 20).without_device().unwrap();
        let limit = Duration::from_secs(20);
        let _ = block_on(client.timeout(limit, client.connect(&url)));
    });
    redirect(&first, &to);
    second.set_nonblocking(true).unwrap();
    let is_followed = (0..1000).any(|_| {
        thread::sleep(Duration::from_millis(10));
        second.accept().is_ok()
    });
    assert!(is_followed, "no connection at {to}");
    drop(second);
    login.join().unwrap();
}
