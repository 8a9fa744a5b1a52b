
program_path=$(mktemp -d)

python3 -c 'import base64, sys, zlib
sys.stdout.buffer.write(zlib.decompress(base64.b64decode(sys.argv[1])))' "$0" > "$program_path/ephemeral_component.py"
_KFP_RUNTIME=true python3 -m kfp.dsl.executor_main                         --component_module_path                         "$program_path/ephemeral_component.py"                         "$@"
