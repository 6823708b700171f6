//! The numbers of target ports in the state directory.

use std::io;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::state::{self, StateDir};
use crate::server::ports::{PortKeeper, WrittenPort};

/// File name in the state directory.
const FILE: &str = "ports.json";

/// Version of the file format.
const VERSION: u32 = 1;

/// Result of moving the file away.
const WITHOUT: &str = "without the file, target ports may get different numbers, and hosts with \
                       several paths may treat them as new ports until they log in again";

/// Stores port numbers in a state directory.
#[derive(Debug)]
pub struct PortFile {
    dir: Arc<StateDir>,
}

/// Contents of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    ports: Vec<WrittenPort>,
}

impl PortFile {
    /// Creates a store in `dir`.
    #[must_use]
    pub fn new(dir: Arc<StateDir>) -> Self {
        Self { dir }
    }
}

impl PortKeeper for PortFile {
    fn load(&self) -> io::Result<Vec<WrittenPort>> {
        let saved = self.dir.load_generation(FILE, VERSION);
        let saved = saved.map_err(|error| state::advise(error, WITHOUT))?;
        let saved: Option<Saved> = saved.into_content();
        Ok(saved.map_or_else(Vec::new, |saved| saved.ports))
    }

    fn save(&self, ports: &[WrittenPort]) -> io::Result<()> {
        let ports = ports.to_vec();
        self.dir.save_generation(FILE, VERSION, &Saved { ports })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_file_is_replaced_or_reported() {
        let name = format!("riserd-ports-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&path);
        let dir = Arc::new(StateDir::lock(&path).unwrap());
        let file = PortFile::new(Arc::clone(&dir));
        assert_eq!(file.load().unwrap(), []);
        let text = r#"{ "version": 1, "ports": [
            { "target": "t", "port": { "Srp": "10.0.0.1:5555" }, "id": 3 },
            { "target": "t", "port": "Iscsi", "id": 1 } ] }"#;
        dir.replace(FILE, text.as_bytes()).unwrap();
        let ports = file.load().unwrap();
        assert_eq!(ports.len(), 2);
        file.save(&ports).unwrap();
        assert_eq!(file.load().unwrap(), ports);
        dir.replace(FILE, b"{").unwrap();
        assert_eq!(file.load().unwrap(), ports);
        for damaged in ["{", &text.replace("\"version\": 1", "\"version\": 2")] {
            for name in [FILE.to_owned(), format!("{FILE}~")] {
                dir.replace(&name, damaged.as_bytes()).unwrap();
            }
            let error = file.load().unwrap_err().to_string();
            assert!(error.contains(FILE) && error.contains("backup"), "{error}");
        }
        std::fs::remove_dir_all(&path).unwrap();
    }
}
