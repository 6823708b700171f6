//! Detects disk image formats.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Offset, magic bytes and name of each format.
const FORMATS: [(usize, &[u8], &str); 7] = [
    (0, b"QFI\xfb", "QCOW"),
    (0, b"QED\0", "QED"),
    (0, b"KDMV", "VMDK"),
    (0, b"# Disk DescriptorFile", "VMDK"),
    (0, b"conectix", "VHD"),
    (0, b"vhdxfile", "VHDX"),
    (0x40, &[0x7f, 0x10, 0xda, 0xbe], "VDI"),
];

/// Returns a note if a file or device contains a disk image format other than raw. Its data would
/// not be interpreted.
pub(super) fn note(path: &Path) -> Option<String> {
    let mut start = Vec::new();
    let file = File::open(path).ok()?;
    file.take(512).read_to_end(&mut start).ok()?;
    let format = format(&start)?;
    Some(format!(
        "disk image ({format}), which would be served as a raw disk, byte by byte: convert it with \
         `qemu-img convert -O raw`"
    ))
}

fn format(start: &[u8]) -> Option<&'static str> {
    let is = |at: usize, magic: &[u8]| start.get(at..at + magic.len()) == Some(magic);
    let known = FORMATS.iter().find(|(at, magic, _)| is(*at, magic));
    known.map(|(_, _, name)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_detected_by_magic_bytes() {
        let mut vdi = vec![0; 0x40];
        vdi.extend([0x7f, 0x10, 0xda, 0xbe]);
        for (start, name) in [
            (b"QFI\xfb\0\0\0\x03".as_slice(), Some("QCOW")),
            (b"vhdxfile", Some("VHDX")),
            (b"conectix", Some("VHD")),
            (b"KDMV\x01", Some("VMDK")),
            (&vdi, Some("VDI")),
            (b"QFI", None),
            (&[0; 512], None),
        ] {
            assert_eq!(format(start), name);
        }
    }
}
