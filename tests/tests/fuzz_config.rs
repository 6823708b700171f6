//! Fuzz target for the configuration file.

use riser_target::config::Config;

/// A valid file, used as the start for all mutations.
const SEED: &str = "\
backends:
  disk: { kind: file, path: /var/lib/disk.img, size: 1GiB, create: true }
targets:
  - name: demo
    portals: [{ protocol: srp, listen: 127.0.0.1 }]
    luns: { 0: disk }
    access: [{ initiator: 0002:c903:00a1:b2c3, luns: [0] }]
limits: { max_sessions: 4 }
";

/// For any text, the result must be a configuration or an error with a location.
fn parse(text: &str) {
    if let Err(error) = Config::parse(text, "fuzz.yaml") {
        let shown = error.to_string();
        assert!(shown.starts_with("fuzz.yaml"), "{shown}");
    }
}

#[test]
fn arbitrary_text() {
    bolero::check!().for_each(|bytes: &[u8]| parse(&String::from_utf8_lossy(bytes)));
}

/// Almost valid text covers more code than random text.
#[test]
fn mutated_file() {
    bolero::check!()
        .with_type::<Vec<(u16, u8, bool)>>()
        .for_each(|edits| {
            let mut text = SEED.as_bytes().to_vec();
            for (at, byte, insert) in edits.iter().take(8) {
                let at = usize::from(*at) % text.len();
                if *insert {
                    text.insert(at, *byte);
                } else {
                    text[at] = *byte;
                }
            }
            parse(&String::from_utf8_lossy(&text));
        });
}
