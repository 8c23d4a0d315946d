"""Import of NxD Training configs: each key is translated to profile keys or reported with a reason.

Start at importer.py. config.py reads the file and resolves its references; translation.py collects the profile's values and a
line for each key; rules.py has the keys that are translated one by one; architecture.py, experts.py, vocabulary.py, data.py and
objective.py have those that depend on each other, and published.py the models whose numbers a config may state. The meaning of
each key follows the source code of NxD Training, and of NeMo and NxD Core, which it builds on. Imports `profiles`,
`profiles.files`, `profiles.huggingface` and `profiles.sections`.
"""

from profiles.nxdt.config import read
from profiles.nxdt.importer import Imported, import_config

__all__ = ["Imported", "import_config", "read"]
