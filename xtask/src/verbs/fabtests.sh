# Builds and installs the tests of libfabric: the arguments are the repository, the tag and the directory.
git clone -q --depth 1 --branch "$1" "$0" libfabric
cd libfabric/fabtests
./autogen.sh
./configure --prefix="$2" --disable-dependency-tracking
make -j "$(nproc)"
make install
cp -r test_configs "$2"
