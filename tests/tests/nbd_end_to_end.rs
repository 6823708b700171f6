//! Tests a `riserd` disk that is attached using `riser attach --nbd` with external NBD clients.

#![allow(missing_docs, reason = "a test")]

use std::fs;
use std::time::Duration;

use riser_testkit::eventually;
use riser_testkit::programs::{Pair, missing, skip, tool};

const SIZE: u64 = 96 << 20;

/// Creates an image of [`SIZE`] bytes that contains an ext4 file system with files.
fn image(pair: &Pair) -> String {
    let tree = pair.dir.join("tree");
    fs::create_dir(&tree).unwrap();
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for (number, len) in [10usize, 100_000, 7_000_000, 20_000_000].iter().enumerate() {
        let bytes: Vec<u8> = (0..*len)
            .map(|_| {
                state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        fs::write(tree.join(format!("file{number}")), bytes).unwrap();
    }
    let image = pair.path("image");
    let blocks = (SIZE >> 10).to_string();
    tool(
        "/usr/sbin/mkfs.ext4",
        [
            "-q",
            "-d",
            tree.to_str().unwrap(),
            "-b",
            "1024",
            &image,
            &blocks,
        ],
    );
    image
}

#[test]
fn images_round_trip_through_nbd() {
    let tools = [
        "nbdcopy",
        "nbdinfo",
        "qemu-img",
        "fio",
        "mkfs.ext4",
        "e2fsck",
    ];
    if let Some(tool) = missing(&tools) {
        return skip("nbd_end_to_end", &format!("{tool} is not installed"));
    }
    let backend = format!("{{ kind: file, path: DIR/disk.img, size: {SIZE}, create: true }}");
    let mut pair = Pair::new(71, &backend);
    let image = image(&pair);
    let (socket, out) = (pair.path("nbd"), pair.path("out"));
    let url = pair.url();
    pair.riser(&["attach", &url, "--channels", "2", "--nbd", &socket]);
    let uri = format!("nbd+unix:///lun0?socket={socket}");
    assert_eq!(tool("nbdinfo", ["--size", &uri]).trim(), SIZE.to_string());

    // Copy the image to the disk, compare and copy it back using different clients, and check it
    // with the tool that created it.
    tool("nbdcopy", ["--flush", &image, &uri]);
    let same = tool(
        "qemu-img",
        ["compare", "-f", "raw", "-F", "raw", &image, &uri],
    );
    assert!(same.contains("Images are identical"), "{same}");
    tool("nbdcopy", [&uri, &out]);
    assert!(
        fs::read(&image).unwrap() == fs::read(&out).unwrap(),
        "output differs from input"
    );
    tool("/usr/sbin/e2fsck", ["-fn", &out]);
    assert!(
        fs::read(&image).unwrap() == fs::read(pair.path("disk.img")).unwrap(),
        "riserd's file is not what went in"
    );

    // Copy it again using qemu, while the target is killed and restarted.
    tool("fio", fio(&uri, "before"));
    let file = pair.path("disk.img");
    let written = || fs::metadata(&file).unwrap().modified().unwrap();
    let before = written();
    let copy = std::thread::spawn({
        let (image, uri) = (image.clone(), uri.clone());
        move || {
            tool(
                "qemu-img",
                [
                    "convert", "-n", "-f", "raw", "-O", "raw", "-S0", &image, &uri,
                ],
            )
        }
    });
    eventually("the copy has begun", Duration::from_secs(60), || {
        written() != before
    });
    pair.kill();
    pair.serve();
    copy.join().unwrap();
    let same = tool(
        "qemu-img",
        ["compare", "-f", "raw", "-F", "raw", &image, &uri],
    );
    assert!(same.contains("Images are identical"), "{same}");
    tool("fio", fio(&uri, "after"));
    pair.riser(&["detach", &socket]);
}

/// Returns arguments to run random writes and verify them.
fn fio(uri: &str, name: &str) -> Vec<String> {
    [
        &format!("--name={name}"),
        "--ioengine=nbd",
        &format!("--uri={uri}"),
        "--rw=randwrite",
        "--bsrange=512-256k",
        "--bs_unaligned=0",
        "--blockalign=512",
        "--size=16M",
        "--iodepth=16",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--do_verify=1",
        "--verify_state_save=0",
    ]
    .map(str::to_owned)
    .to_vec()
}
