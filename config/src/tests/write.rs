//! Written files can be parsed again with the same result, and match the schema.

use std::fmt::Write;

use proptest::prelude::*;
use serde_json::Value;

use crate::*;

/// Random generator. The seed is printed on failure.
struct Chance(u64);

impl Chance {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) as usize % most
    }

    fn is(&mut self) -> bool {
        self.below(2) == 1
    }

    fn one<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[self.below(of.len())]
    }

    /// Returns text that is difficult for YAML.
    fn text(&mut self, least: usize) -> String {
        const PARTS: [&str; 16] = [
            "a", "Z", "0", "-", ": ", " #", "\"", "'", "\\", "ä", "€", "🦀", "{", "]", "null",
            "\u{2028}",
        ];
        let mut text = String::new();
        for _ in 0..least + self.below(4) {
            text.push_str(self.one(&PARTS));
        }
        text
    }
}

/// Quotes a string in JSON syntax, which is valid in YAML.
fn quoted(text: &str) -> String {
    serde_json::to_string(text).unwrap()
}

fn secret(chance: &mut Chance) -> String {
    let value = match chance.below(4) {
        0 => ("secret", chance.text(12)),
        1 => ("secret_file", format!("/{}", chance.text(1))),
        2 => ("secret_env", "RISER_SECRET".to_owned()),
        _ => ("secret_credential", format!("c{}", chance.below(9))),
    };
    format!("{}: {}", value.0, quoted(&value.1))
}

fn chap(chance: &mut Chance) -> String {
    let (first, second) = (quoted(&chance.text(1)), quoted(&chance.text(2)));
    let mut text = format!("{{ users: [{{ name: {first}, {} }}]", secret(chance));
    if chance.is() {
        let _ = write!(
            text,
            ", mutual: {{ name: {second}, secret: \"another secret of ours\" }}"
        );
    }
    if chance.is() {
        text += ", algorithms: [sha3-256, sha256]";
    }
    text + " }"
}

fn backend(chance: &mut Chance, n: usize) -> String {
    let size = chance.one(&["4096", "1MiB", "3KiB", "12345344", "1.5GiB", "2TiB"]);
    let path = quoted(&format!("/{n}/{}", chance.text(1)));
    let mut text = match chance.below(5) {
        0 => format!("kind: file, path: {path}"),
        1 => format!("kind: file, path: {path}, size: {size}, create: true"),
        2 => format!(
            "kind: device, path: {path}, direct: {}",
            chance.one(&["auto", "on", "off"])
        ),
        3 => format!("kind: ram, size: {size}"),
        _ => format!("kind: \"null\", size: {size}"),
    };
    // These values must be unique per backend.
    let serial = format!("serial: \"001{n}\"");
    let short_naa = format!("naa: 3123456789abcde{n:x}");
    let long_naa = format!("naa: 6123456789abcdef0123456789abcde{n:x}");
    let extras = [
        "block_size: 512",
        "write_cache: off",
        "thin: false",
        "stoppable: true",
        "protection: { type: 2 }",
        "protection: { type: 3, owner: client }",
        "threshold: 75%",
        "rotational: true",
        "rotational: false",
        &serial,
        &short_naa,
        &long_naa,
        "vendor: ' # '",
        "product: \"yes\"",
        "revision: \"1e05\"",
    ];
    let mut seen: Vec<&str> = Vec::new();
    for extra in extras {
        let key = extra.split(':').next().unwrap();
        let is_thin_file = text.starts_with("kind: file") && !seen.contains(&"thin");
        let is_device = text.starts_with("kind: device");
        if (key == "threshold" && !is_thin_file) || (key == "protection" && is_device) {
            continue;
        }
        if chance.is() && !seen.contains(&key) {
            seen.push(key);
            let _ = write!(text, ", {extra}");
        }
    }
    text
}

fn portals(chance: &mut Chance, target: usize) -> (String, bool) {
    let (mut text, mut needs_iqn) = (String::new(), false);
    for n in 0..1 + chance.below(3) {
        let protocol = chance.one(&["srp", "iscsi", "iser"]);
        needs_iqn |= protocol != "srp";
        let host = chance.one(&["192.0.2.1", "[2001:db8::1]", "0.0.0.0", "[::]", "", "eth0"]);
        let port = 1000 + 10 * target + n;
        let mut portal = format!("protocol: {protocol}, listen: \"{host}:{port}\"");
        for key in ["ioc_guid", "service_guid", "id_ext"] {
            if chance.below(4) == 0 {
                let _ = write!(portal, ", {key}: 0x0200c0ffee00000{}", chance.below(9));
            }
        }
        if protocol == "srp" && chance.is() {
            let to = chance.one(&["192.0.2.7", "2001:db8::7"]);
            let _ = write!(portal, ", redirect: {{ to: \"{to}\" }}");
        }
        if protocol == "iscsi" && chance.is() {
            let _ = write!(
                portal,
                ", redirect: {{ to: \"other:33\", permanent: {} }}",
                chance.is()
            );
        }
        let _ = writeln!(text, "      - {{ {portal} }}");
    }
    (text, needs_iqn)
}

fn target(chance: &mut Chance, n: usize, backends: &[String]) -> String {
    let (portals, needs_iqn) = portals(chance, n);
    let mut text = format!("  - name: t{n}\n    portals:\n{portals}");
    if needs_iqn || chance.is() {
        let _ = writeln!(text, "    iqn: iqn.2026-01.com.example:t{n}");
    }
    let mut numbers = Vec::new();
    for number in [0, 7, 16_383] {
        if chance.is() {
            let backend = quoted(&backends[chance.below(backends.len())]);
            let lun = match chance.is() {
                true => backend,
                false => format!("{{ backend: {backend}, read_only: {} }}", chance.is()),
            };
            numbers.push((number, lun));
        }
    }
    let luns: Vec<_> = numbers.iter().map(|(n, l)| format!("{n}: {l}")).collect();
    let _ = writeln!(text, "    luns: {{ {} }}", luns.join(", "));
    if chance.is() {
        let _ = writeln!(text, "    chap: {}", chap(chance));
    }
    match chance.below(3) {
        0 => text.push_str("    access: open\n"),
        1 => {}
        _ => {
            text.push_str("    access:\n");
            let rules = [
                "initiator: 0002:c903:00a1:b2c3",
                "initiator: 0x00000000000000010002c90300a1b2c4, address: 192.0.2.0/24",
                "iqn: iqn.1993-08.org.debian:01:host",
                "address: 2001:db8::/64",
            ];
            for rule in rules {
                if chance.is() {
                    continue;
                }
                let is_srp = rule.starts_with("initiator");
                let own = match !is_srp && chance.is() {
                    true => format!(", chap: {}", chap(chance)),
                    false => String::new(),
                };
                let mask: Vec<_> = numbers.iter().map(|(n, _)| n.to_string()).collect();
                let map = numbers
                    .iter()
                    .map(|(n, lun)| format!("{}: {lun}", n / 2 + 1));
                let mask = match chance.below(3) {
                    0 => format!(", luns: [{}]", mask.join(", ")),
                    1 => format!(", luns: {{ {} }}", map.collect::<Vec<_>>().join(", ")),
                    _ => String::new(),
                };
                let _ = writeln!(text, "      - {{ {rule}{mask}{own} }}");
            }
            text.push_str("      - { address: 127.0.0.1 }\n");
        }
    }
    text
}

/// Returns a random valid configuration.
fn any_config(seed: u64) -> String {
    let chance = &mut Chance(seed);
    let mut text = String::from("backends:\n");
    let prefixes = ["b", "", "no-", ":", "0x"];
    let names: Vec<_> = (0..1 + chance.below(4))
        .map(|n| format!("{}{n}", chance.one(&prefixes)))
        .collect();
    for (n, name) in names.iter().enumerate() {
        let _ = writeln!(text, "  {}: {{ {} }}", quoted(name), backend(chance, n));
    }
    text.push_str("targets:\n");
    for n in 0..1 + chance.below(3) {
        text.push_str(&target(chance, n, &names));
    }
    let rest = [
        "identity: \"on\"",
        "workers: { count: 4, cpus: [0, 1, 2, 3] }",
        "limits: { queue_depth: 17, max_transfer: 2MiB, buffer_pool_mib: 9 }",
        "limits: { max_sessions: 1, sessions_per_address: 1, channels_per_session: 2, max_iu_size: 512 }",
        "limits: { connections_per_session: 8, error_recovery_level: 2 }",
        "transport: { provider: auto, mtu: 1024 }",
        "transport: { on_link: true }",
        "transport: { shm: true }",
        "transport: { administrator: 'fd00::1' }",
        "transport: { provider: shm }",
        "transport: { provider: rdma_core, faults: { loss: 0.1%, duplicate: 12.5, seed: 0 } }",
        "admin: { socket: none }",
        "metrics: { listen: '127.0.0.1:9909' }",
        "metrics: { listen: '[::]:9909', remote: true }",
        "state: { directory: \"/var/lib/some where\" }",
        "log: { filter: \"info,riser_target=debug\", format: json }",
        "log: { audit: off }",
    ];
    let mut seen: Vec<&str> = Vec::new();
    for line in rest {
        let key = line.split(':').next().unwrap();
        if chance.is() && !seen.contains(&key) {
            seen.push(key);
            let _ = writeln!(text, "{line}");
        }
    }
    if chance.is() {
        let _ = writeln!(text, "discovery_chap: {}", chap(chance));
    }
    text
}

fn read(text: &str) -> Config {
    Config::parse(text, "test.yaml").unwrap_or_else(|e| panic!("{e}\n{text}"))
}

proptest! {
    #[test]
    fn written_configuration_reads_back_equal(seed: u64) {
        let config = read(&any_config(seed));
        let yaml = config.to_yaml();
        prop_assert_eq!(&read(&yaml), &config, "{}", yaml);
        let json = config.to_value().to_string();
        prop_assert_eq!(&read(&json), &config, "{}", json);
        prop_assert_eq!(diff(&config, &read(&yaml)), vec![]);
    }

    #[test]
    fn written_configuration_matches_schema(seed: u64) {
        let config = read(&any_config(seed));
        let value = config.to_value();
        let schema = schema();
        prop_assert_eq!(validate(&schema, &schema, &value, ""), Ok(()));
    }
}

#[test]
fn examples_match_schema() {
    let schema = schema();
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/examples");
    let mut seen = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "yaml") {
            let text = std::fs::read_to_string(&path).unwrap();
            let value: Value = serde_saphyr::from_str(&text).unwrap();
            validate(&schema, &schema, &value, "").unwrap_or_else(|e| panic!("{path:?}: {e}"));
            seen += 1;
        }
    }
    assert!(seen >= 2);
}

#[test]
fn schema_rejects_invalid_files() {
    let schema = schema();
    for (text, place) in [
        ("{ targets: [], backend: {} }", "/backend"),
        ("{ targets: [{ name: t }] }", "/targets/0/portals"),
        ("{ backends: { a: { kind: tape } } }", "/backends/a/kind"),
        ("{ limits: { queue_depth: many } }", "/limits/queue_depth"),
        (
            "{ targets: [{ name: t, portals: [], access: closed }] }",
            "/targets/0/access",
        ),
    ] {
        let value: Value = serde_saphyr::from_str(text).unwrap();
        let error = validate(&schema, &schema, &value, "").unwrap_err();
        assert!(error.starts_with(place), "{error}");
    }
}

/// Checks a value against the keywords used by the schema. Unknown keywords are an error.
fn validate(root: &Value, schema: &Value, value: &Value, at: &str) -> Result<(), String> {
    let Value::Object(keywords) = schema else {
        let allowed = schema
            .as_bool()
            .expect("a schema is an object or a boolean");
        return if allowed {
            Ok(())
        } else {
            Err(format!("{at}: not allowed"))
        };
    };
    let empty = serde_json::Map::new();
    let properties = keywords.get("properties").and_then(Value::as_object);
    let properties = properties.unwrap_or(&empty);
    for (keyword, wanted) in keywords {
        let fits = match keyword.as_str() {
            "$schema" | "title" | "description" | "definitions" | "format" | "default"
            | "examples" | "properties" | "x-unit" | "x-limits" => true,
            "$ref" => {
                let place = wanted.as_str().unwrap().strip_prefix('#').unwrap();
                validate(root, root.pointer(place).expect(place), value, at)?;
                true
            }
            "type" => match wanted {
                Value::Array(kinds) => kinds.iter().any(|kind| is_of(value, kind)),
                kind => is_of(value, kind),
            },
            "enum" => wanted.as_array().unwrap().contains(value),
            "const" => wanted == value,
            "minimum" => value.as_f64().is_none_or(|n| n >= wanted.as_f64().unwrap()),
            "maximum" => value.as_f64().is_none_or(|n| n <= wanted.as_f64().unwrap()),
            "anyOf" | "oneOf" => {
                let mut ways = wanted.as_array().unwrap().iter();
                ways.any(|way| validate(root, way, value, at).is_ok())
            }
            "allOf" => {
                for part in wanted.as_array().unwrap() {
                    validate(root, part, value, at)?;
                }
                true
            }
            "items" => {
                for (n, item) in value.as_array().into_iter().flatten().enumerate() {
                    validate(root, wanted, item, &format!("{at}/{n}"))?;
                }
                true
            }
            "required" => {
                for key in wanted.as_array().unwrap() {
                    let key = key.as_str().unwrap();
                    if value.as_object().is_some_and(|map| !map.contains_key(key)) {
                        return Err(format!("{at}/{key}: is missing"));
                    }
                }
                true
            }
            "additionalProperties" => {
                for (key, part) in value.as_object().into_iter().flatten() {
                    if !properties.contains_key(key) {
                        validate(root, wanted, part, &format!("{at}/{key}"))?;
                    }
                }
                true
            }
            other => panic!("the schema uses `{other}`"),
        };
        if !fits {
            return Err(format!("{at}: {value} is not of {keyword} {wanted}"));
        }
    }
    for (key, schema) in properties {
        if let Some(part) = value.get(key) {
            validate(root, schema, part, &format!("{at}/{key}"))?;
        }
    }
    Ok(())
}

fn is_of(value: &Value, kind: &Value) -> bool {
    match kind.as_str().unwrap() {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("the schema uses type `{other}`"),
    }
}

/// Collects the names of all properties below a schema node, including references.
fn properties(value: &serde_json::Value, names: &mut std::collections::BTreeSet<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (key, value) in fields {
                if key == "properties"
                    && let Some(properties) = value.as_object()
                {
                    names.extend(properties.keys().cloned());
                }
                properties(value, names);
            }
        }
        serde_json::Value::Array(items) => {
            items.iter().for_each(|item| properties(item, names));
        }
        _ => {}
    }
}

/// `full.yaml` should contain all keys of the schema.
#[test]
fn full_example_contains_all_keys() {
    let mut names = std::collections::BTreeSet::new();
    properties(&schema(), &mut names);
    assert!(names.len() > 50, "{names:?}");
    let text = include_str!("../../../deploy/examples/full.yaml");
    let is_key = |name: &str, line: &str| {
        let line = line.split(" #").next().unwrap_or_default();
        let key = format!("{name}:");
        line.match_indices(&key).any(|(at, _)| {
            let before = line[..at].chars().next_back();
            before.is_none_or(|c| " {,".contains(c))
        })
    };
    let lacks: Vec<_> = names
        .iter()
        .filter(|name| !text.lines().any(|line| is_key(name, line)))
        .collect();
    assert_eq!(lacks, [] as [&String; 0]);
}
