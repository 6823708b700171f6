//! The numbers of target ports, in the state directory.

use std::io;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::state::{self, StateDir};
use crate::server::ports::{PortKeeper, WrittenPort};

/// The file in the state directory.
const FILE: &str = "ports.json";

/// The version of the file's form.
const VERSION: u32 = 1;

/// Result of moving the file away.
const WITHOUT: &str = "then target ports may get other numbers, and hosts with several paths may take them for new \
                       ports until they log in again";

/// Keeps the numbers of ports in a state directory.
#[derive(Debug)]
pub struct PortFile {
    dir: Arc<StateDir>,
}

/// Content of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    ports: Vec<WrittenPort>,
}

impl PortFile {
    /// Keeps them in `dir`.
    #[must_use]
    pub fn new(dir: Arc<StateDir>) -> Self {
        Self { dir }
    }
}

impl PortKeeper for PortFile {
    fn load(&self) -> io::Result<Vec<WrittenPort>> {
        let saved = self.dir.load(FILE, VERSION);
        let saved: Option<Saved> = saved.map_err(|error| state::advise(error, WITHOUT))?;
        Ok(saved.map_or_else(Vec::new, |saved| saved.ports))
    }

    fn save(&self, ports: &[WrittenPort]) -> io::Result<()> {
        let ports = ports.to_vec();
        self.dir.save(FILE, VERSION, &Saved { ports })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_file_is_an_error_and_none_is_nothing() {
        let name = format!("riserd-ports-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&path);
        let dir = Arc::new(StateDir::take(&path).unwrap());
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
        for damaged in ["{", &text.replace("\"version\": 1", "\"version\": 2")] {
            dir.replace(FILE, damaged.as_bytes()).unwrap();
            let error = file.load().unwrap_err().to_string();
            assert!(error.contains(FILE) && error.contains("backup"), "{error}");
        }
        std::fs::remove_dir_all(&path).unwrap();
    }
}
